// Products of few tokens with large matrices that are read without a pause, and how blocks wait for each other.
//
// Every block owns rows of each matrix, whole, so that no sums cross blocks. One thread of it asks the copy engine for
// those rows, matrix after matrix, as fast as a ring of slots in shared memory has room. It waits for no result, so
// memory is read while blocks wait for each other. Eight warps multiply; each takes every eighth step of 16 columns,
// and their sums are added up in a fixed order.
//
// What blocks hand on is kept in the order in which tensor cores take it (`handed_on`). Products are m16n8k16: tokens are
// the 16, of which 8 are used, rows of weights the 8.
#pragma once
#include "ring.cuh"

constexpr int WARPS = 8, CONSUMERS = WARPS * 32;
constexpr int TILE = 1024;  // bytes of 8 rows x 64 columns

struct Thread {
    int num_tokens, warp, lane;
    int token, pair;              // of a product with 8 tokens it holds one, columns 2 * pair and the next
    u32 offset;                   // of the row that it gives ldmatrix, swizzled as the copy engine does
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
    const int matrix = me.lane / 8, line = me.lane % 8;  // of four: columns 0 and 8 of a tile, then of the next tile
    me.offset = matrix / 2 * TILE + line * 128 + ((me.warp % 4 * 2 + matrix % 2) ^ line) * 16;
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
template <int N> __device__ __forceinline__ bool are_there(const u32 (&pairs)[N][2])
{
    u32 largest = 0;
    #pragma unroll
    for (int i = 0; i < N; i++) largest = max(largest, max(pairs[i][0], pairs[i][1]));
    return largest != EMPTY;
}

// What a block wrote before it arrived is seen by all that have waited. Each meeting adds `size` to the counter, so
// where it stood before the first of a launch, which no block has passed without this one, is the last multiple.
struct Meeting {
    u64* counter;
    int size;
    u64 target;
    __device__ Meeting(u64* counter, int size)
        : counter(counter), size(size), target(acquired(counter) / size * size) {}
    __device__ void arrive(int weight = 1)
    {
        consumers_meet();
        target += size;
        if (threadIdx.x == CONSUMERS - 1) add_released(counter, weight);
    }
    // By a thread of the last warp, which is the least likely to have asked for keys: it would wait for them first.
    __device__ void wait() const
    {
        if (threadIdx.x == CONSUMERS - 1) see();
        consumers_meet();
    }
    __device__ void meet() { arrive(), wait(); }
    __device__ void see() const
    {
        look_until([&] { return acquired(counter) >= target; });
    }
};

using Ring = RingOf<SLOTS, SLOT_BYTES>;

// The rows of one matrix that this block owns, some columns at a time.
template <int SIZE, int TILES, int CHUNKS>
__device__ __forceinline__ void fetch(Ring& ring, const TensorMap& map, int row, u64 policy)
{
    #pragma unroll 1
    for (int chunk = 0; chunk < SIZE / 64; chunk += CHUNKS) {
        wait(ring.freed(), ring.parity ^ 1);
        expect(ring.filled(), TILES * TILE * CHUNKS);
        copy(ring.at(), map, chunk, row, ring.filled(), policy);
        ring.advance();
    }
}

// Where a pair of columns of 8 tokens stands, so that a thread finds its part of 16 columns side by side.
template <int SIZE> __device__ __forceinline__ u32& handed_on(u32* to, int column, int token)
{
    return to[(column / 16 * 32 + token * 4 + column % 8 / 2) * 2 + column / 8 % 2];
}

// This warp's share of the sums of TILES x 8 rows; of each four the first two are of tokens. `before_last` is called in
// front of the last stage.
template <int SIZE, int TILES, int CHUNKS, class BeforeLast>
__device__ __forceinline__ void multiply(float (&sums)[TILES][4], Ring& ring, const u32* from, const Thread& me,
                                         BeforeLast before_last)
{
    constexpr int STEPS = CHUNKS * 4, MINE = (STEPS + WARPS - 1) / WARPS, STAGES = SIZE / 64 / CHUNKS;
    constexpr int AHEAD = STAGES < 4 ? STAGES : 2;
    static_assert(SIZE % (64 * CHUNKS) == 0 && TILES * TILE * CHUNKS <= SLOT_BYTES, "stages");
    u32 x[AHEAD][MINE][2];  // of the next stages
    auto look = [&](u32 (&to)[MINE][2], int stage) {
        #pragma unroll
        for (int i = 0; i < MINE; i++)
            if (me.is_live && (STEPS % WARPS == 0 || me.warp + i * WARPS < STEPS))
                load(to[i], from + ((stage * STEPS + me.warp + i * WARPS) * 32 + me.lane) * 2);
    };
    #pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++)
        #pragma unroll
        for (int i = 0; i < MINE; i++)
            x[ahead][i][0] = x[ahead][i][1] = me.is_live && (STEPS % WARPS == 0 || me.warp + i * WARPS < STEPS) ? EMPTY : 0;
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0;
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
            #pragma unroll
            for (int i = 0; i < MINE; i++) {
                if (STEPS % WARPS && me.warp + i * WARPS >= STEPS) continue;
                const u32 weights = ring.at() + (me.warp / 4 + i * (WARPS / 4)) * (TILES * TILE) + me.offset;
                #pragma unroll
                for (int tile = 0; tile + 1 < TILES; tile += 2) {
                    u32 b[4];
                    load_matrices(b, weights + tile * TILE);
                    multiply_add(sums[tile], x[ahead][i][0], 0, x[ahead][i][1], 0, b[0], b[1]);
                    multiply_add(sums[tile + 1], x[ahead][i][0], 0, x[ahead][i][1], 0, b[2], b[3]);
                    seen ^= b[0];
                }
                if (TILES % 2) {
                    u32 b[2];
                    load_matrices(b, weights + (TILES - 1) * TILE);
                    multiply_add(sums[TILES - 1], x[ahead][i][0], 0, x[ahead][i][1], 0, b[0], b[1]);
                    seen ^= b[0];
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
__device__ __forceinline__ void add_up(const float (&sums)[TILES][4], float2* scratch, const Thread& me, Use use)
{
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
                    const float(&from)[4] = sums[first + i + g * ITEMS];
                    scratch[((i * SETS + g) * WARPS + me.warp) * 32 + me.lane] = make_float2(from[0], from[1]);
                }
        consumers_meet();
        for (int i = me.warp; i < ROUND && first + i < ITEMS; i += WARPS) {
            float2 values[SETS];
            #pragma unroll
            for (int g = 0; g < SETS; g++) {
                values[g] = make_float2(0, 0);
                #pragma unroll
                for (int warp = 0; warp < WARPS; warp++) {
                    const float2 share = scratch[((i * SETS + g) * WARPS + warp) * 32 + me.lane];
                    values[g].x += share.x, values[g].y += share.y;
                }
            }
            use(first + i, values);
        }
    }
}
