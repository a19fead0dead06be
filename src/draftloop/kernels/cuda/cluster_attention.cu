// Attention of few tokens a row to paged keys and values, in one kernel: a row's keys are shared out among the blocks of a
// cluster, which at the end read each other's results in shared memory and weigh them.
//
// A block has one row, the query heads that share one key/value head, and a split of the keys. All of them stand in its
// shared memory at once, or as many as it has stages for; those of earlier passes are asked for before the kernel in front
// has ended, which writes this pass's alone. Warps have 16 queries each, tokens times heads of the group, and a
// part of each stage's keys: products are m16n8k16, and what comes out of the first, weights of keys, goes into the second
// as it lies in registers. Sums are added up in a fixed order.
//
// cluster_attention.py defines GROUP, HEAD_DIM, PAGE_SIZE, ROW_TILES (of 16 queries), WARPS, STAGES and CLUSTER
// (splits). A grid is splits by key/value heads by rows.
#include "instructions.cuh"

constexpr int BLOCK_THREADS = WARPS * 32, KEY_WARPS = WARPS / ROW_TILES, QUERIES = ROW_TILES * 16;
constexpr int STAGE_KEYS = 64, KEYS = STAGE_KEYS / KEY_WARPS, KEY_TILES = KEYS / 8;  // a warp's, of a stage
constexpr int UNIT = 16;                                                            // keys that splits begin at
constexpr int CHUNKS = HEAD_DIM / 8, DIM_TILES = HEAD_DIM / 8, DIM_STEPS = HEAD_DIM / 16;  // chunks: of 16 bytes
constexpr int HALF_BYTES = STAGE_KEYS * HEAD_DIM * 2, STAGE_BYTES = 2 * HALF_BYTES;  // keys, then values
constexpr int QUERY_BYTES = QUERIES * HEAD_DIM * 2;
constexpr int PARTIALS = CLUSTER * KEY_WARPS;
static_assert(WARPS % ROW_TILES == 0 && KEYS % 16 == 0, "a warp has 16 queries and, of a stage, 16 keys or more");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "a row of keys is 8 or 16 chunks");
static_assert(PAGE_SIZE % UNIT == 0 && BLOCK_THREADS % CHUNKS == 0, "threads ask for a chunk of a key each");
static_assert(WARPS * 16 * HEAD_DIM * 4 <= STAGES * STAGE_BYTES, "results stand where the stages were");

struct Attention {
    const uint4 *queries, *keys, *values;  // [T, H, D]; [P, S, G, D] by these strides, in chunks
    uint2* out;                            // [T, H, D]
    const int *rows, *kv_lens, *page_table;
    long long page_stride, token_stride, head_stride;
    int table_width, query_len;
    float scale;  // of scores that are exponents of 2
};

struct Keys {  // of a block: [begin, end), of which those from `first_new` on are this pass's
    int begin, end, first_new;
    const int* pages;
    __device__ int stages() const { return (end - begin + STAGE_KEYS - 1) / STAGE_KEYS; }
    __device__ bool are_old(int stage) const { return min(begin + (stage + 1) * STAGE_KEYS, end) <= first_new; }
};

__device__ __forceinline__ Keys keys_of(const Attention& a)
{
    const int entry = blockIdx.z, kv_len = a.kv_lens[entry], units = (kv_len + UNIT - 1) / UNIT, split = blockIdx.x;
    Keys keys;
    keys.begin = units * split / CLUSTER * UNIT;
    keys.end = min(units * (split + 1) / CLUSTER * UNIT, kv_len);
    keys.first_new = kv_len - a.query_len;
    keys.pages = a.page_table + (long long)a.rows[entry] * a.table_width;
    return keys;
}

// Chunks of eight rows at the same place are in different banks.
__device__ __forceinline__ u32 place(u32 row, u32 chunk) { return (row * CHUNKS + (chunk ^ row % 8)) * 16; }

// What is no key reads as zeros, not as what the page holds: 0 * NaN would be NaN.
__device__ __forceinline__ void ask_for(const Attention& a, const Keys& keys, int stage)
{
    if (stage < keys.stages()) {
        constexpr int ROWS = BLOCK_THREADS / CHUNKS;  // that are asked for at once
        const int chunk = threadIdx.x % CHUNKS, first = keys.begin + stage * STAGE_KEYS;
        unsigned char* const to = shared_memory() + stage % STAGES * STAGE_BYTES;
        int pages[STAGE_KEYS / ROWS];
        #pragma unroll
        for (int i = 0; i < STAGE_KEYS / ROWS; i++) {
            const int key = first + i * ROWS + threadIdx.x / CHUNKS;
            pages[i] = key < keys.end ? keys.pages[key / PAGE_SIZE] : -1;
        }
        #pragma unroll
        for (int i = 0; i < STAGE_KEYS / ROWS; i++) {
            const int row = i * ROWS + threadIdx.x / CHUNKS, key = first + row;
            const bool is_none = pages[i] < 0;
            const long long at = is_none ? 0 : pages[i] * a.page_stride + key % PAGE_SIZE * a.token_stride +
                                                   blockIdx.y * a.head_stride + chunk;
            copy_later((uint4*)(to + place(row, chunk)), a.keys + at, is_none);
            copy_later((uint4*)(to + HALF_BYTES + place(row, chunk)), a.values + at, is_none);
        }
    }
    commit_copies();  // of nothing too: whoever waits counts
}

// Where a query's dimensions begin in [T, H], and those of what it finds.
__device__ __forceinline__ long long row_of(const Attention& a, int query)
{
    const int token = query / GROUP, head = blockIdx.y * GROUP + query % GROUP;
    return (blockIdx.z * (long long)a.query_len + token) * (gridDim.y * GROUP) + head;
}

// Rounded as they came; of queries that are none, zeros.
__device__ __forceinline__ void take_queries(const Attention& a, unsigned char* to)
{
    #pragma unroll
    for (int i = 0; i < QUERIES * CHUNKS / BLOCK_THREADS; i++) {
        const int query = (i * BLOCK_THREADS + threadIdx.x) / CHUNKS, chunk = threadIdx.x % CHUNKS;
        uint4 part = make_uint4(0, 0, 0, 0);
        if (query < a.query_len * GROUP) part = load_four(a.queries + row_of(a, query) * CHUNKS + chunk);
        *(uint4*)(to + place(query, chunk)) = part;
    }
}

struct Found {  // of a warp: for each of its rows and 8 more
    float results[DIM_TILES][4], peaks[2], totals[2];
};

// Of the four threads that have a row.
__device__ __forceinline__ float highest(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float total(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// A stage's keys of this warp, from `row` of the stage on; `first`: which key that is, `last_seen`: the last of the block
// that each of two rows sees.
__device__ __forceinline__ void fold(Found& found, const u32 (&queries)[DIM_STEPS][4], u32 stage, int row, int first,
                                     const int (&last_seen)[2], float scale)
{
    const int lane = threadIdx.x % 32;
    float scores[KEY_TILES][4];
    #pragma unroll
    for (int tile = 0; tile < KEY_TILES; tile++) scores[tile][0] = scores[tile][1] = scores[tile][2] = scores[tile][3] = 0;
    #pragma unroll
    for (int tile = 0; tile < KEY_TILES; tile += 2)
        #pragma unroll
        for (int step = 0; step < DIM_STEPS; step++) {
            u32 b[4];
            load_matrices(b, stage + place(row + tile * 8 + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
            const auto& q = queries[step];
            multiply_add(scores[tile], q[0], q[1], q[2], q[3], b[0], b[1]);
            multiply_add(scores[tile + 1], q[0], q[1], q[2], q[3], b[2], b[3]);
        }
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        float peak = lowest();
        #pragma unroll
        for (int tile = 0; tile < KEY_TILES; tile++)
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                float& score = scores[tile][2 * half + i];
                score = first + tile * 8 + lane % 4 * 2 + i <= last_seen[half] ? score * scale : lowest();
                peak = fmaxf(peak, score);
            }
        peak = fmaxf(found.peaks[half], highest(peak));
        const float shift = peak == lowest() ? 0 : peak;  // who has seen no key has no peak
        const float keep = power_of_two(found.peaks[half] - shift);
        float sum = 0;
        #pragma unroll
        for (int tile = 0; tile < KEY_TILES; tile++)
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                float& score = scores[tile][2 * half + i];
                score = power_of_two(score - shift);
                sum += score;
            }
        found.peaks[half] = peak, found.totals[half] = found.totals[half] * keep + total(sum);
        #pragma unroll
        for (int tile = 0; tile < DIM_TILES; tile++)
            found.results[tile][2 * half] *= keep, found.results[tile][2 * half + 1] *= keep;
    }
    #pragma unroll
    for (int tile = 0; tile < KEY_TILES; tile += 2) {
        const u32 weights[4] = {
            rounded(scores[tile][0], scores[tile][1]), rounded(scores[tile][2], scores[tile][3]),
            rounded(scores[tile + 1][0], scores[tile + 1][1]), rounded(scores[tile + 1][2], scores[tile + 1][3])};
        #pragma unroll
        for (int dims = 0; dims < DIM_TILES; dims += 2) {
            u32 b[4];
            load_transposed(b, stage + HALF_BYTES + place(row + tile * 8 + lane % 16, dims + lane / 16));
            multiply_add(found.results[dims], weights[0], weights[1], weights[2], weights[3], b[0], b[1]);
            multiply_add(found.results[dims + 1], weights[0], weights[1], weights[2], weights[3], b[2], b[3]);
        }
    }
}

// Warps' results, and their highest scores and total weights: where the stages were, and behind the queries.
__device__ __forceinline__ void show(const Found& found, u32 results, u32 sums)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char* const memory = shared_memory();
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp * 16 + lane / 4 + 8 * half;
        if (lane % 4 == 0) *(float2*)(memory + sums + row * 8) = make_float2(found.peaks[half], found.totals[half]);
        #pragma unroll
        for (int tile = 0; tile < DIM_TILES; tile++)
            *(float2*)(memory + results + (row * HEAD_DIM + tile * 8 + lane % 4 * 2) * 4) =
                make_float2(found.results[tile][2 * half], found.results[tile][2 * half + 1]);
    }
}

// All that splits and warps have found of some queries' dimensions. Row r of a block: warp r / 16, whose queries are those
// of tile `warp % ROW_TILES`.
__device__ __forceinline__ void combine(const Attention& a, u32 results, u32 sums)
{
    constexpr int FOURS = HEAD_DIM / 4;
    const int all = a.query_len * GROUP * FOURS;
    for (int i = blockIdx.x * BLOCK_THREADS + threadIdx.x; i < all; i += CLUSTER * BLOCK_THREADS) {
        const int query = i / FOURS, four = i % FOURS;
        auto row = [&](int partial) { return ((partial % KEY_WARPS) * ROW_TILES + query / 16) * 16 + query % 16; };
        float2 found[PARTIALS];
        float peak = lowest();
        #pragma unroll
        for (int partial = 0; partial < PARTIALS; partial++) {
            found[partial] = load_pair_from(sums + row(partial) * 8, partial / KEY_WARPS);
            peak = fmaxf(peak, found[partial].x);
        }
        const float shift = peak == lowest() ? 0 : peak;
        float weight = 0, result[4] = {0, 0, 0, 0};
        #pragma unroll
        for (int partial = 0; partial < PARTIALS; partial++) {
            const float4 more = load_four_from(results + (row(partial) * FOURS + four) * 16, partial / KEY_WARPS);
            const float share = power_of_two(found[partial].x - shift);
            weight += share * found[partial].y;
            result[0] += share * more.x, result[1] += share * more.y;
            result[2] += share * more.z, result[3] += share * more.w;
        }
        const float scale = weight == 0 ? 0 : __fdividef(1, weight);  // padding attends to nothing
        uint2 pairs;
        pairs.x = rounded(result[0] * scale, result[1] * scale), pairs.y = rounded(result[2] * scale, result[3] * scale);
        a.out[row_of(a, query) * FOURS + four] = pairs;
    }
}

__device__ __forceinline__ void blocks_meet()
{
    if constexpr (CLUSTER > 1) cluster_meets();
    else __syncthreads();
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) cluster_attention(const __grid_constant__ Attention a)
{
    constexpr u32 QUERIES_AT = STAGES * STAGE_BYTES, SUMS_AT = QUERIES_AT + QUERY_BYTES;
    const Keys keys = keys_of(a);
    int asked = 0;
    for (; asked < STAGES && keys.are_old(asked); asked++) ask_for(a, keys, asked);
    await_kernel_in_front();
    for (; asked < STAGES; asked++) ask_for(a, keys, asked);
    take_queries(a, shared_memory() + QUERIES_AT);
    __syncthreads();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row_tile = warp % ROW_TILES, first = warp / ROW_TILES * KEYS;
    const u32 memory = address(shared_memory());
    u32 queries[DIM_STEPS][4];
    #pragma unroll
    for (int step = 0; step < DIM_STEPS; step++)
        load_matrices(queries[step], memory + QUERIES_AT + place(row_tile * 16 + lane % 16, 2 * step + lane / 16));
    int last_seen[2];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = (row_tile * 16 + lane / 4 + 8 * half) / GROUP;
        last_seen[half] = token < a.query_len ? min(keys.first_new + token, keys.end - 1) : -1;
    }
    Found found;
    #pragma unroll
    for (int tile = 0; tile < DIM_TILES; tile++)
        found.results[tile][0] = found.results[tile][1] = found.results[tile][2] = found.results[tile][3] = 0;
    found.peaks[0] = found.peaks[1] = lowest(), found.totals[0] = found.totals[1] = 0;
    for (int stage = 0; stage < keys.stages(); stage++) {
        await_copies<STAGES - 1>();
        __syncthreads();
        const int key = keys.begin + stage * STAGE_KEYS + first;
        if (key < keys.end)
            fold(found, queries, memory + stage % STAGES * STAGE_BYTES, first, key, last_seen, a.scale);
        __syncthreads();
        ask_for(a, keys, stage + STAGES);
    }
    let_next_kernel_start();
    await_copies<0>();  // of nothing that is read: results take their place
    __syncthreads();
    show(found, 0, SUMS_AT);
    blocks_meet();
    combine(a, memory, memory + SUMS_AT);
    if constexpr (CLUSTER > 1) cluster_meets();  // nobody reads a block that has ended
}
