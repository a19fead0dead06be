// How weights lie in a stage, in bf16 or in words of 16 bits that hold 2 floats or 4 integers each (packed_values.py),
// and how products take them from there.
//
// PLANES values are in a word: 1 bf16, 2 e4m3, 4 integers. A chunk is of 128 columns, of 64 in bf16. The copy engine
// brings lines of 128 bytes whatever they hold, and ldmatrix hands out pairs of words: a plane of such a pair is two
// columns side by side, so it becomes a register of bf16 in a few instructions. What weights multiply has been ordered
// to match (`handed_on`).
//
// Integers are put into the mantissa of 128, so 128 too large: what is more, and their zero point, comes off the sums
// of 64 columns, by a product with ones that a warp's rows share. These sums are scaled by their group, that of a
// chunk; scales of rows are for who adds up the warps' shares.
#pragma once
#include "ring.cuh"

constexpr int WORDS = PLANES == 1 ? 64 : 128 / PLANES, CHUNK_COLUMNS = WORDS * PLANES;  // of a row in a chunk
constexpr int TILE = 8 * WORDS * 2;         // bytes of 8 rows x a chunk
constexpr int UNITS = WORDS / 16;           // of a chunk: what a warp takes at a time
constexpr int REGISTERS = 2 * PLANES;       // of a thread, for what a unit multiplies
constexpr bool IS_GROUPED = PLANES == 4;
constexpr int KINDS = IS_GROUPED + ZEROS + 1;  // of what a matrix consists of: words, scales of groups, zero points

// What the copy engine brings at once: [chunk][tile] of words, then of each further kind [chunk][tile][row] of 16 bits.
template <int TILES, int CHUNKS> struct StageOf {
    static constexpr u32 CHUNK_BYTES = TILES * TILE, GROUPS_AT = CHUNKS * CHUNK_BYTES;
    static constexpr u32 KIND_BYTES = (CHUNKS * TILES * 16 + 127) / 128 * 128;
    static constexpr u32 BYTES = GROUPS_AT + (KINDS - 1) * KIND_BYTES;
    static constexpr u32 COPIED = CHUNKS * TILES * (TILE + (KINDS - 1) * 16);
    static_assert(BYTES <= SLOT_BYTES, "streamed_plan.py puts too much into a stage");
};

__device__ __forceinline__ void load_unit(u32 (&x)[REGISTERS], const u32* from, int unit, int lane)
{
    if constexpr (PLANES == 1) {
        load(*(u32(*)[2])x, from + (unit * 32 + lane) * 2);
    } else {
        #pragma unroll
        for (int part = 0; part < REGISTERS / 4; part++) {
            uint4 four;
            load(four, (const uint4*)from + (unit * (REGISTERS / 4) + part) * 32 + lane);
            x[4 * part] = four.x, x[4 * part + 1] = four.y, x[4 * part + 2] = four.z, x[4 * part + 3] = four.w;
        }
    }
}

// What a product takes of the words of a pair of tiles, which are ordered as matrices of bf16 would be: first words, of
// both tiles, then second ones. `part`: of the unit, which has PLANES; HALF: of its columns; `nibbles`: 0x000f000f,
// which the compiler does not know, as it would make it anew each time.
template <int HALF> __device__ __forceinline__ u32 plane(const u32 (&words)[4], int tile, int part, u32 nibbles)
{
    const int at = 2 * part + HALF, plane = at % PLANES;
    const u32 pair = words[at / PLANES * 2 + tile];
    if constexpr (PLANES == 1) return pair;
    if constexpr (PLANES == 4) return masked_or<0x43004300>(pair >> 4 * plane, nibbles);  // in the mantissa of 128
    // the sign, the rest where bf16 has it; exponents have another bias, which a product with 2^120 puts right
    const u32 bits = plane == 0 ? (pair << 8 & 0x80008000) | (pair << 4 & 0x07f007f0)
                                : (pair & 0x80008000) | (pair >> 4 & 0x07f007f0);
    return product_of_pairs(bits, 0x7b807b80);
}

// Of a block's rows of packed words, where sums are added up: of two sets, or of one.
template <int SETS, int TILES> struct RowScales {
    float* kept;      // in shared memory, sets one after the other
    int row, second;  // of the matrix: the first one, and how many rows further on the second set is
    // By the warp that has used those of its tiles in the layer before.
    __device__ void ask(const float* scales, int warp, int lane) const
    {
        if (PLANES == 1 || !scales) return;
        __syncwarp();
        for (int tile = warp; tile < TILES / SETS; tile += 8)
            for (int set = 0; set < SETS; set++)
                if (lane < 8)
                    copy_later((u32*)kept + (set * (TILES / SETS) + tile) * 8 + lane,
                               (const u32*)scales + row + set * second + tile * 8 + lane);
    }
    __device__ float2 scaled(float2 sums, int tile, int set, int pair) const
    {
        if (PLANES == 1) return sums;
        const float* by = kept + (set * (TILES / SETS) + tile) * 8 + 2 * pair;
        return make_float2(sums.x * by[0], sums.y * by[1]);
    }
};
