// Products of few tokens with large matrices that are read without a pause, and how blocks find what others hand on.
//
// Every block owns rows of each matrix, whole, so that no sums cross blocks. One thread of it asks the copy engine for
// those rows, matrix after matrix, as fast as a ring of slots in shared memory has room. It waits for no result, so
// memory is read while blocks wait for each other. Eight warps multiply; each takes every eighth unit of some columns
// (packed.cuh), and their sums are added up in a fixed order.
//
// What blocks hand on is kept in the order in which tensor cores take it (`handed_on`). Products are m16n8k16: rows of
// weights are the 16, two tiles of 8, and tokens the 8.
#pragma once
#include "packed.cuh"

constexpr int WARPS = 8, CONSUMERS = WARPS * 32;

struct Thread {
    int num_tokens, warp, lane;
    int token, pair;              // of sums it holds one token's, of columns 2 * pair and the next
    u32 offset, last_offset;      // of the rows that it gives ldmatrix, swizzled as the copy engine does
    u32 never;                    // 0, which the compiler does not know
    bool is_live, are_few;        // whether its token is one; whether there are at most two
};

__device__ __forceinline__ Thread this_thread(int num_tokens)
{
    Thread me;
    int thread = threadIdx.x;
    forget(thread);  // else what follows from it would be kept from layer to layer, which registers have no room for
    me.num_tokens = num_tokens, me.warp = thread / 32u, me.lane = thread % 32u;
    me.token = me.lane / 4, me.pair = me.lane % 4;
    me.is_live = me.token < num_tokens, me.are_few = num_tokens <= 2, me.never = num_tokens > TOKENS ? ~0u : 0;
    const auto place = [&](int tile, int half) {  // of 8 words, half of what a unit has of a row
        const int at = tile * TILE + me.lane % 8 * WORDS * 2 + (me.warp % UNITS * 2 + half) * 16;
        return at ^ at / 128 % 8 * 16;
    };
    const int matrix = me.lane / 8;  // of four of two tiles, or of two of the last one
    me.offset = place(matrix % 2, matrix / 2), me.last_offset = place(0, matrix % 2);
    return me;
}

__device__ __forceinline__ void consumers_meet() { threads_meet(CONSUMERS); }

// What blocks hand on says itself that it is there: before, its words are EMPTY, which no sum is and no
// pair of rounded numbers. Whoever needs it looks until it is there, so nothing waits for more than its own inputs.
constexpr u32 EMPTY = ~0u;
template <int N> __device__ __forceinline__ bool are_there(const u32 (&words)[N])
{
    u32 largest = 0;
    #pragma unroll
    for (int i = 0; i < N; i++) largest = max(largest, words[i]);
    return largest != EMPTY;
}
template <int N, int M> __device__ __forceinline__ bool are_there(const u32 (&words)[N][M])
{
    u32 largest = 0;
    #pragma unroll
    for (int i = 0; i < N * M; i++) largest = max(largest, words[i / M][i % M]);
    return largest != EMPTY;
}

using Ring = RingOf<SLOTS, SLOT_BYTES>;

// The rows of one matrix that this block owns, some columns at a time.
template <int SIZE, int TILES, int CHUNKS>
__device__ __forceinline__ void fetch(Ring& ring, const TensorMap (&maps)[KINDS], int row, u64 policy)
{
    using Stage = StageOf<TILES, CHUNKS>;
    #pragma unroll 1
    for (int chunk = 0; chunk < SIZE / CHUNK_COLUMNS; chunk += CHUNKS) {
        wait(ring.freed(), ring.parity ^ 1);
        expect(ring.filled(), Stage::COPIED);
        copy(ring.at(), maps[0], chunk, row * (TILE / 8) / 128, ring.filled(), policy);
        #pragma unroll
        for (int kind = 1; kind < KINDS; kind++)
            copy(ring.at() + Stage::GROUPS_AT + (kind - 1) * Stage::KIND_BYTES, maps[kind], chunk, row / 8,
                 ring.filled(), policy);
        ring.advance();
    }
}

// Where a pair of columns of 8 tokens stands, so that a thread finds its part of a unit side by side.
template <int SIZE> __device__ __forceinline__ u32& handed_on(u32* to, int column, int token)
{
    constexpr int AT_ONCE = REGISTERS < 4 ? REGISTERS : 4;
    const int plane = column % CHUNK_COLUMNS / WORDS, word = column % WORDS;
    const int unit = column / CHUNK_COLUMNS * UNITS + word / 16, place = word / 8 % 2 * PLANES + plane;
    const int part = unit * (REGISTERS / AT_ONCE) + place / AT_ONCE;
    return to[(part * 32 + token * 4 + column % 8 / 2) * AT_ONCE + place % AT_ONCE];
}

// The sums of TILES x 8 rows, those of two tiles side by side. A thread has one row of each, and two tokens.
template <int TILES> using Sums = float[(TILES + 1) / 2][4];

// Adds what this warp's units of a stage contribute, from `step` on each eighth one. Some pairs of tiles are multiplied
// side by side, since products that are added to each other wait for each other. All that is loaded goes into `seen`.
template <class Stage, int TILES, int COUNT>
__device__ __forceinline__ void multiply_units(Sums<TILES>& sums, const u32 (&x)[COUNT][REGISTERS], u32 stage, int step,
                                               u32& seen, const Thread& me)
{
    constexpr int PAIRS = (TILES + 1) / 2, ALL = COUNT * PAIRS, AT_ONCE = IS_GROUPED ? 4 : PAIRS;
    constexpr u32 ONES = 0x3f803f80;
    const u32 nibbles = 0x000f000f | me.never;
    float totals[COUNT][4];  // of what is multiplied
    #pragma unroll
    for (int begin = 0; begin < ALL; begin += AT_ONCE) {
        u32 words[AT_ONCE][4], scales[AT_ONCE][2], zeros[AT_ONCE][2];
        float found[AT_ONCE][4];
        #pragma unroll
        for (int i = 0; i < AT_ONCE && begin + i < ALL; i++) {
            const int tile = (begin + i) % PAIRS * 2, chunk = step / UNITS + (begin + i) / PAIRS * (WARPS / UNITS);
            const u32 at = stage + chunk * Stage::CHUNK_BYTES + tile * TILE;
            const u32 turned = at % 1024 ? 64 : 0;  // addresses are what is swizzled
            if (tile + 1 < TILES) {
                load_matrices(words[i], at + (me.offset ^ turned));
            } else {
                u32 last[2];
                load_matrices(last, at + (me.last_offset ^ turned));
                words[i][0] = last[0], words[i][2] = last[1], words[i][1] = words[i][3] = 0;
            }
            seen ^= words[i][0];
            #pragma unroll
            for (int second = 0; IS_GROUPED && second < 2 && tile + second < TILES; second++) {
                const u32 group = stage + Stage::GROUPS_AT + ((chunk * TILES + tile + second) * 8 + me.lane / 4) * 2;
                seen ^= scales[i][second] = load_half(group);
                if (ZEROS) seen ^= zeros[i][second] = load_half(group + Stage::KIND_BYTES);
            }
        }
        #pragma unroll
        for (int part = 0; part < PLANES; part++)
            #pragma unroll
            for (int i = 0; i < AT_ONCE && begin + i < ALL; i++) {
                const int unit = (begin + i) / PAIRS, pair = (begin + i) % PAIRS;
                const u32 first = x[unit][2 * part], second = x[unit][2 * part + 1];
                if (IS_GROUPED && part == 0) found[i][0] = found[i][1] = found[i][2] = found[i][3] = 0;
                if (IS_GROUPED && pair == 0) {
                    if (part == 0) totals[unit][0] = totals[unit][1] = totals[unit][2] = totals[unit][3] = 0;
                    multiply_add(totals[unit], ONES, ONES, ONES, ONES, first, second);
                }
                multiply_add(IS_GROUPED ? found[i] : sums[pair], plane<0>(words[i], 0, part, nibbles),
                             plane<0>(words[i], 1, part, nibbles), plane<1>(words[i], 0, part, nibbles),
                             plane<1>(words[i], 1, part, nibbles), first, second);
            }
        #pragma unroll
        for (int i = 0; IS_GROUPED && i < AT_ONCE && begin + i < ALL; i++) {
            const int unit = (begin + i) / PAIRS, pair = (begin + i) % PAIRS;
            #pragma unroll
            for (int second = 0; second < 2 && pair * 2 + second < TILES; second++) {
                const float scale = from_half(scales[i][second]);
                const float surplus = ZEROS ? low(zeros[i][second] | 0x4300) : 136;  // 128 and more
                #pragma unroll
                for (int token = 0; token < 2; token++)
                    sums[pair][2 * second + token] +=
                        scale * (found[i][2 * second + token] - surplus * totals[unit][token]);
            }
        }
    }
}

// This warp's share. `before_last` is called in front of the last stage.
template <int SIZE, int TILES, int CHUNKS, class BeforeLast>
__device__ __forceinline__ void multiply(Sums<TILES>& sums, Ring& ring, const u32* from, const Thread& me,
                                         BeforeLast before_last)
{
    using Stage = StageOf<TILES, CHUNKS>;
    constexpr int STEPS = CHUNKS * UNITS, MINE = (STEPS + WARPS - 1) / WARPS, STAGES = SIZE / CHUNK_COLUMNS / CHUNKS;
    constexpr int AHEAD = STAGES < 4 && !IS_GROUPED ? STAGES : IS_GROUPED && TILES <= 4 && MINE <= 2 ? 3 : 2;
    static_assert(SIZE % (CHUNK_COLUMNS * CHUNKS) == 0, "stages");
    // a stage of less units than there are warps is for some of them, which take turns
    const auto first_unit = [&](int stage) {
        return WARPS % STEPS || STEPS == WARPS ? me.warp : (me.warp - stage * STEPS) & (WARPS - 1);
    };
    const auto has_unit = [&](int stage, int i) {
        return me.is_live && (STEPS % WARPS == 0 || first_unit(stage) + i * WARPS < STEPS);
    };
    u32 x[AHEAD][MINE][REGISTERS];  // of the next stages
    auto look = [&](u32 (&to)[MINE][REGISTERS], int stage) {
        #pragma unroll
        for (int i = 0; i < MINE; i++)
            if (has_unit(stage, i)) load_unit(to[i], from, stage * STEPS + first_unit(stage) + i * WARPS, me.lane);
    };
    #pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++)
        #pragma unroll
        for (int i = 0; i < MINE; i++)
            #pragma unroll
            for (int r = 0; r < REGISTERS; r++) x[ahead][i][r] = has_unit(ahead, i) ? EMPTY : 0;
    #pragma unroll
    for (float(&four)[4] : sums) four[0] = four[1] = four[2] = four[3] = 0;
    int stages = STAGES;
    forget(stages);  // else the loop would be unrolled whole
    for (int first = 0; first < stages; first += AHEAD) {
        #pragma unroll
        for (int ahead = 0; ahead < AHEAD; ahead++) {
            const int stage = first + ahead;
            if (STAGES % AHEAD && stage >= stages) break;
            if (!are_there(x[ahead])) {
                const auto look_at_next = [&] {
                    #pragma unroll
                    for (int i = 1; i < AHEAD; i++)
                        if (stage + i < stages && !are_there(x[(ahead + i) % AHEAD]))
                            look(x[(ahead + i) % AHEAD], stage + i);
                };
                look_until([&] {
                    look(x[ahead], stage);
                    if (me.are_few) look_at_next();  // of many tokens that would take bandwidth from weights
                    return are_there(x[ahead]);
                });
                look_at_next();
            }
            if (stage + 1 == stages) before_last();
            wait(ring.filled(), ring.parity);
            __syncwarp();
            u32 seen = 0;
            if constexpr (STEPS % WARPS == 0) {
                multiply_units<Stage, TILES, MINE>(sums, x[ahead], ring.at(), me.warp, seen, me);
            } else {
                #pragma unroll
                for (int i = 0; i < MINE; i++) {
                    const int step = first_unit(stage) + i * WARPS;
                    const u32(&one)[1][REGISTERS] = *(const u32(*)[1][REGISTERS])&x[ahead][i];
                    if (step < STEPS) multiply_units<Stage, TILES, 1>(sums, one, ring.at(), step, seen, me);
                }
            }
            __syncwarp();
            // the slot is free when its loads have returned, not when they have been issued: arrivals overtake them
            if (me.lane == 0) arrive(ring.freed() + (seen & me.never));
            ring.advance();
            if (stage + AHEAD < stages) look(x[ahead], stage + AHEAD);
        }
    }
}

// Adds up the warps' shares, and calls `use(tile, values)` once for each product; SETS 2: with the values of tile and
// tile + TILES / 2. A tile always comes to the same warp.
template <int SETS, int TILES, class Use>
__device__ __forceinline__ void add_up(const Sums<TILES>& sums, const RowScales<SETS, TILES>& rows, float2* scratch,
                                       const Thread& me, Use use)
{
    // to where who needs it finds it: a token's columns side by side, without conflicts of banks
    const int from = (me.lane % 4 * 16 + me.lane / 4) ^ me.lane % 4 / 2 * 8, to = me.lane ^ me.lane / 16 * 4;
    constexpr int ROUND = SCRATCH_BYTES / (WARPS * SETS * 32 * sizeof(float2)), ITEMS = TILES / SETS;
    static_assert(ROUND % WARPS == 0, "a tile would change its warp");
    #pragma unroll
    for (int first = 0; first < ITEMS; first += ROUND) {
        consumers_meet();
        #pragma unroll
        for (int i = 0; i < ROUND; i++)
            #pragma unroll
            for (int g = 0; g < SETS; g++)
                if (first + i < ITEMS) {
                    const int tile = first + i + g * ITEMS;
                    float* share = (float*)(scratch + ((i * SETS + g) * WARPS + me.warp) * 32);
                    share[from] = sums[tile / 2][tile % 2 * 2], share[from ^ 8] = sums[tile / 2][tile % 2 * 2 + 1];
                }
        consumers_meet();
        for (int i = me.warp; i < ROUND && first + i < ITEMS; i += WARPS) {
            float2 values[SETS];
            #pragma unroll
            for (int g = 0; g < SETS; g++) {
                values[g] = make_float2(0, 0);
                #pragma unroll
                for (int warp = 0; warp < WARPS; warp++) {
                    const float2 share = scratch[((i * SETS + g) * WARPS + warp) * 32 + to];
                    values[g].x += share.x, values[g].y += share.y;
                }
                values[g] = rows.scaled(values[g], first + i, g, me.pair);
            }
            use(first + i, values);
        }
    }
}
