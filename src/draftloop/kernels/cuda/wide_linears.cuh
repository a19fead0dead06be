// Products of 9 to 64 tokens: those of linears.cuh, with tokens as the 64 rows of Hopper's products of warp groups, and
// rows of weights, which are a multiple of 8, as their columns.
//
// Blocks are in pairs. Of q, k and v, o and down a block multiplies the rows of both with half of the columns, so that
// half as many tokens pass through its shared memory, and sends the sums of the other's rows to it. Two groups of four
// warps multiply, each half of the rows: of the block of its number, or, of gates and what they multiply, some of both.
//
// Tokens come by the copy engine too, through a ring of their own, since they are there only when blocks have met while
// weights need not wait. It is empty between a matrix and the next meeting, and is the block's scratch memory then.
#pragma once
#include "linears.cuh"

constexpr int TOKEN_SLOTS = 3, TOKEN_SLOT_BYTES = SCRATCH_BYTES / TOKEN_SLOTS;
constexpr int TOKEN_BYTES = TOKENS * 128;  // of 64 columns
static_assert(CLUSTER == 2, "pairs");
static_assert(TOKENS % 16 == 0 && TOKENS <= 64, "tokens");
static_assert(TOKEN_BYTES <= TOKEN_SLOT_BYTES && TOKEN_SLOT_BYTES % 1024 == 0, "slots");
static_assert(SLOT_BYTES >= 64 * 128, "products read 64 rows from where the last tokens stand");

using TokenRing = RingOf<TOKEN_SLOTS, TOKEN_SLOT_BYTES>;
struct Rings {
    Ring weights;
    TokenRing tokens;
};

// Chunks of 64 columns that come at once, of `all`, where weights come CHUNKS at once.
__device__ constexpr int token_chunks(int all, int chunks)
{
    int most = TOKEN_SLOT_BYTES / TOKEN_BYTES;
    while (all % most || (most % chunks && chunks % most)) most--;
    return most;
}

// COLUMNS of all tokens.
template <int COLUMNS, int CHUNKS>
__device__ __forceinline__ void fetch_tokens(TokenRing& ring, const TensorMap& map, int first = 0)
{
    constexpr int AT_ONCE = token_chunks(COLUMNS / 64, CHUNKS);
    #pragma unroll 1
    for (int column = first; column < first + COLUMNS; column += 64 * AT_ONCE) {
        wait(ring.freed(), ring.parity ^ 1);
        expect(ring.filled(), TOKEN_BYTES * AT_ONCE);
        #pragma unroll 1
        for (int chunk = 0; chunk < AT_ONCE; chunk++)
            copy_tokens(ring.at() + chunk * TOKEN_BYTES, map, column + chunk * 64, ring.filled());
        ring.advance();
    }
}

// COLUMNS of the TILES x 8 rows of each group of warps.
template <int COLUMNS, int TILES, int CHUNKS>
__device__ __forceinline__ void fetch_weights(Ring& ring, const TensorMap& map, int column, int row, int second_row,
                                              u64 policy)
{
    constexpr u32 BYTES = TILES * TILE * CHUNKS;
    static_assert(COLUMNS % (64 * CHUNKS) == 0 && 2 * BYTES <= SLOT_BYTES, "stages");
    #pragma unroll 1
    for (int chunk = column / 64; chunk < (column + COLUMNS) / 64; chunk += CHUNKS) {
        wait(ring.freed(), ring.parity ^ 1);
        expect(ring.filled(), 2 * BYTES);
        copy(ring.at(), map, chunk, row, ring.filled(), policy);
        copy(ring.at() + BYTES, map, chunk, second_row, ring.filled(), policy);
        ring.advance();
    }
}

// Where a pair of columns of a token stands in what blocks hand on.
template <int SIZE> __device__ __forceinline__ u32& handed_on(u32* to, int column, int token)
{
    return to[(token * SIZE + column) / 2];
}

template <int FIRST, int TILES>
__device__ __forceinline__ void multiply_add_rows(float (&sums)[TILES][4], u32 tokens, u32 weights)
{
    constexpr int LEFT = TILES - FIRST, COUNT = LEFT >= 14 ? 14 : LEFT >= 8 ? 8 : LEFT >= 6 ? 6 : LEFT >= 4 ? 4 : LEFT;
    multiply_add_64<FIRST, COUNT>(sums, described(tokens), described(weights + FIRST * TILE));
    if constexpr (LEFT > COUNT) multiply_add_rows<FIRST + COUNT>(sums, tokens, weights);
}

// Sums of this group's TILES x 8 rows. Of each four two are of one token, and two of that 8 further on.
template <int COLUMNS, int TILES, int CHUNKS>
__device__ __forceinline__ void multiply(float (&sums)[TILES][4], Rings& rings, const Thread& me)
{
    constexpr int ALL = COLUMNS / 64, OF_TOKENS = token_chunks(ALL, CHUNKS);
    constexpr int AT_ONCE = OF_TOKENS < CHUNKS ? OF_TOKENS : CHUNKS;
    Ring& weights = rings.weights;
    TokenRing& tokens = rings.tokens;
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0;
    const u32 rows = me.warp / 4 * (TILES * TILE * CHUNKS);
    u32 read_tokens = 0, read_weights = 0;  // slots that the products before these read
    auto free_read = [&] {
        if (read_tokens && me.lane == 0) arrive(read_tokens);
        if (read_weights && me.lane == 0) arrive(read_weights);
    };
    for (int first = 0; first < ALL; first += AT_ONCE) {
        const int of_tokens = first % OF_TOKENS, of_weights = first % CHUNKS;
        if (of_weights == 0) wait(weights.filled(), weights.parity);
        if (of_tokens == 0) wait(tokens.filled(), tokens.parity);
        __syncwarp();
        begin_products();
        #pragma unroll
        for (int chunk = 0; chunk < AT_ONCE; chunk++)
            #pragma unroll
            for (int step = 0; step < 4; step++)
                multiply_add_rows<0>(sums, tokens.at() + (of_tokens + chunk) * TOKEN_BYTES + step * 32,
                                     weights.at() + rows + (of_weights + chunk) * (TILES * TILE) + step * 32);
        commit_products();
        await_products<1>();
        free_read();
        read_tokens = of_tokens + AT_ONCE == OF_TOKENS ? tokens.freed() : 0;
        read_weights = of_weights + AT_ONCE == CHUNKS ? weights.freed() : 0;
        if (read_tokens) tokens.advance();
        if (read_weights) weights.advance();
    }
    await_products<0>();
    free_read();
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        #pragma unroll
        for (int i = 0; i < 4; i++) forget(sums[tile][i]);  // else they might be read before they are there
}

// Calls `use(item, token, values)` once for each of a group's products; SETS 2: with the values of item and of
// item + TILES / 2.
template <int SETS, int TILES, class Use>
__device__ __forceinline__ void for_products(const float (&sums)[TILES][4], const Thread& me, Use use)
{
    if (me.warp % 4 >= TOKENS / 16) return;
    int token = me.warp % 4 * 16 + me.token;
    forget(token);  // else what follows from it would be kept from layer to layer, which registers have no room for
    #pragma unroll
    for (int item = 0; item < TILES / SETS; item++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 values[SETS];
            #pragma unroll
            for (int g = 0; g < SETS; g++) {
                const float(&mine)[4] = sums[item + g * (TILES / SETS)];
                values[g] = make_float2(mine[2 * half], mine[2 * half + 1]);
            }
            use(item, token + 8 * half, values);
        }
}

// What the other block of the pair sends.
struct Received {
    float4* sums;  // [tiles][128]
    u32 barrier, parity = 0;
};

// Sends the other block's rows to it, and calls `use` for this block's: by the group of its number.
template <int TILES, class Use>
__device__ __forceinline__ void exchange(float (&sums)[TILES][4], Received& received, const Thread& me, Use use)
{
    constexpr u32 BYTES = TILES * TOKENS / 16 * 32 * sizeof(float4);
    if (threadIdx.x == 0) expect(received.barrier, BYTES);
    const int rank = blockIdx.x % 2;
    float4* place = received.sums + threadIdx.x % 128;
    if (me.warp / 4 == rank) {
        wait_in_cluster(received.barrier, received.parity);
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const float4 other = place[tile * 128];
            sums[tile][0] += other.x, sums[tile][1] += other.y, sums[tile][2] += other.z, sums[tile][3] += other.w;
        }
        for_products<1>(sums, me, use);
    } else if (me.warp % 4 < TOKENS / 16) {
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            send(address(place + tile * 128), sums[tile], received.barrier, rank ^ 1);
    }
    received.parity ^= 1;
}
