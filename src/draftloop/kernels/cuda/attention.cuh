// Attention of a pass's tokens, at most 8 of a row, to paged keys and values, inside a kernel whose blocks are all
// running.
//
// A row's keys are tiles of 16: the first are the pass's own, which go to the cache on the way, then come those that
// are in the cache. A block has one row, the heads that share one key/value head, and a split of the tiles, the same in
// each layer. Its eight warps score a tile each; then each has 16 dimensions of the results, and folds the tiles into
// them one after the other. Splits of a row meet, and weigh each other's results in a fixed order.
//
// Products are m16n8k16 here too. Keys, then dimensions of values, are the 16; the 8 are queries: tokens times heads
// that share keys. Dimensions are taken in an order in which a thread's share of a key is 16 bytes in a row.
//
// Sizes: KV_HEADS, GROUP (query heads to each), HEAD_DIM, PAGE_SIZE, and QUERY_TILES, of 8 queries of a row.
#pragma once
#include "linears.cuh"

constexpr int QUERIES = QUERY_TILES * 8, KEYS = 16, MAX_SPLITS = 16, ROW_TOKENS = 8;
constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes, 8 dimensions each
constexpr int HEADS = KV_HEADS * GROUP, ALL_HEADS = HEADS + 2 * KV_HEADS;
constexpr int WEIGHTS_WIDTH = 20;  // of 32 bits, padded: queries of a key side by side, in pairs
constexpr int VALUES_BYTES = WARPS * KEYS * HEAD_DIM * 2;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "a half of a head is two or four chunks for a thread");
static_assert(PAGE_SIZE % KEYS == 0 && QUERY_TILES <= 4, "a tile has one page; registers hold 32 queries");

struct AttentionMemory {
    uint4 queries[QUERIES * CHUNKS], new_keys[ROW_TOKENS * CHUNKS];
    u32 weights[WARPS * KEYS][WEIGHTS_WIDTH];
    float peaks[WARPS][QUERIES], totals[WARPS][QUERIES];
};
static_assert(VALUES_BYTES <= SCRATCH_BYTES, "values of tiles stand where sums are added up at other times");

struct Batch {  // as attention.base.AttentionBatch
    const int* rows;          // [R]
    const int* query_starts;  // [R + 1]
    const int* kv_lens;       // [R]
    const int* page_table;    // [M, table_width]
    const long long* positions;  // [T]
    const long long* slots;      // [T]
    const float* cos_sin;        // [L, HEAD_DIM]: cosines, then sines
    int num_rows, table_width, num_splits;
    float scale;  // of scores that are exponents of 2
};

struct Partials {
    u32* results;   // [blocks, QUERIES, HEAD_DIM]: splits of an item are blocks side by side
    u32* sums;      // [blocks, QUERIES, 2]: the highest score, and the total weight
};

struct Share {  // a block's, of attention in each layer
    int item, split, kv_head, start, num_tokens, num_new, num_old, begin, end;
    const int* pages;
    int page;  // of this warp's first tile
    bool is_any;
};

struct Keys { uint4 part[HEAD_DIM / 32][2]; };  // a thread's, of a tile

// Chunks of rows are swizzled so that 8 rows at the same chunk, or 2 at the same 4, are in different banks.
__device__ __forceinline__ u32 place(u32 row, u32 chunk)
{
    return row * CHUNKS + (chunk ^ (row % 2 * 4 + row / 2 % 4));
}

__device__ __forceinline__ Share share_of(const Batch& batch, int item)
{
    Share share;
    share.item = item, share.split = blockIdx.x % batch.num_splits;
    share.is_any = share.item < batch.num_rows * KV_HEADS;
    if (!share.is_any) return share;
    const int row = share.item / KV_HEADS, kv_len = batch.kv_lens[row];
    share.kv_head = share.item % KV_HEADS;
    share.start = batch.query_starts[row];
    share.num_tokens = min(batch.query_starts[row + 1] - share.start, QUERIES / GROUP);
    share.num_new = min(kv_len, share.num_tokens);  // padding has no keys
    share.num_old = kv_len - share.num_new;
    const int tiles = 1 + (share.num_old + KEYS - 1) / KEYS;
    share.begin = (long long)tiles * share.split / batch.num_splits;
    share.end = (long long)tiles * (share.split + 1) / batch.num_splits;
    share.pages = batch.page_table + (long long)batch.rows[row] * batch.table_width;
    const int tile = share.begin + threadIdx.x / 32;
    share.page = tile == 0 || tile >= share.end ? 0 : share.pages[(tile - 1) * KEYS / PAGE_SIZE];
    return share;
}

// Where a thread's part of a tile begins, which the cache has; `live`: how many of its keys are some.
struct Tile {
    long long at;
    int live;
    __device__ Tile(const Share& share, int tile, int page)
    {
        const int key = (tile - 1) * KEYS;
        live = share.num_old - key;
        at = (((long long)page * PAGE_SIZE + key % PAGE_SIZE) * KV_HEADS + share.kv_head) * CHUNKS;
    }
};
__device__ __forceinline__ void ask_for_keys(Keys& keys, const Tile& tile, const uint4* cached_keys, u32 lane)
{
    #pragma unroll
    for (int half = 0; half < 2; half++)
        #pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) {
            const u32 line = lane / 4 + 8 * half;
            keys.part[i][half] = make_uint4(0, 0, 0, 0);
            if ((int)line < tile.live)
                keys.part[i][half] = load_four(cached_keys + tile.at + line * (KV_HEADS * CHUNKS) + 4 * i + lane % 4);
        }
}
__device__ __forceinline__ void ask_for_values(uint4* values, const Tile& tile, const uint4* cached_values, u32 warp,
                                               u32 lane)
{
    #pragma unroll
    for (int i = 0; i < KEYS * CHUNKS / 32; i++) {
        const u32 line = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        const bool is_live = (int)line < tile.live;  // what is no key may be anything, NaN too
        copy_later(values + place(warp * KEYS + line, chunk),
                   cached_values + tile.at + (is_live ? line * (KV_HEADS * CHUNKS) + chunk : 0), !is_live);
    }
}

// Below 0: the cache has no such tile.
__device__ __forceinline__ int page_of(const Share& share, int tile)
{
    return tile == 0 || tile >= share.end ? -1 : share.pages[(tile - 1) * KEYS / PAGE_SIZE];
}
// Asks for this warp's tile, from `first` on, if the cache has it. Its values come to shared memory.
__device__ __forceinline__ void ask_for_tile(Keys& keys, uint4* values, const Share& share, int first,
                                             const uint4* cached_keys, const uint4* cached_values, const Thread& me)
{
    const int tile = first + me.warp;
    if (tile == 0 || tile >= share.end) return;
    const Tile asked(share, tile, first == share.begin ? share.page : page_of(share, tile));
    int thread = threadIdx.x;
    forget(thread);  // else what follows from it would be kept from layer to layer, which registers have no room for
    ask_for_keys(keys, asked, cached_keys, thread % 32u);
    ask_for_values(values, asked, cached_values, thread / 32u, thread % 32u);
}

// 8 dimensions, and those half a head further on, turned by their angles.
__device__ __forceinline__ void rotate(uint4& first, uint4& second, const float* cosines, const float* sines)
{
    u32* const one[4] = {&first.x, &first.y, &first.z, &first.w};
    u32* const two[4] = {&second.x, &second.y, &second.z, &second.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float cos[2] = {cosines[2 * i], cosines[2 * i + 1]}, sin[2] = {sines[2 * i], sines[2 * i + 1]};
        const float x[2] = {low(*one[i]), high(*one[i])}, y[2] = {low(*two[i]), high(*two[i])};
        *one[i] = rounded(x[0] * cos[0] - y[0] * sin[0], x[1] * cos[1] - y[1] * sin[1]);
        *two[i] = rounded(y[0] * cos[0] + x[0] * sin[0], y[1] * cos[1] + x[1] * sin[1]);
    }
}

__device__ __forceinline__ bool is_there(const uint4& x) { return max(max(x.x, x.y), max(x.z, x.w)) != EMPTY; }

// This pass's queries; for the split that begins with them, its keys and values, which go to the cache too.
template <class Memory>
__device__ __forceinline__ void take_in(Memory& memory, uint4* values, const uint4* qkv, const Share& share,
                                        const float (&angles)[ROW_TOKENS][HEAD_DIM], const Batch& batch,
                                        uint4* cached_keys, uint4* cached_values)
{
    constexpr int HALF = CHUNKS / 2;
    const int num_tokens = share.num_tokens, num_queries = num_tokens * GROUP;
    const int num_lines = num_queries + (share.begin == 0 && share.end > 0 ? num_tokens + KEYS : 0);
    for (int i = threadIdx.x; i < num_lines * HALF; i += CONSUMERS) {
        const int line = i / HALF, chunk = i % HALF;
        const bool is_query = line < num_queries, is_value = line >= num_queries + num_tokens;
        const int token = is_query ? line / GROUP : line - num_queries - (is_value ? num_tokens : 0);
        const int head = is_query ? share.kv_head * GROUP + line % GROUP
                                  : HEADS + (is_value ? KV_HEADS : 0) + share.kv_head;
        uint4 first = make_uint4(0, 0, 0, 0), second = first;
        if (token < num_tokens) {
            const uint4* from = qkv + ((share.start + token) * ALL_HEADS + head) * CHUNKS + chunk;
            look_until([&] {
                load(first, from), load(second, from + HALF);
                return is_there(first) && is_there(second);
            });
            if (!is_value) rotate(first, second, angles[token] + chunk * 8, angles[token] + HEAD_DIM / 2 + chunk * 8);
        }
        uint4* to = is_query ? memory.queries : is_value ? values : memory.new_keys;
        to[place(is_query ? line : token, chunk)] = first;
        to[place(is_query ? line : token, chunk + HALF)] = second;
        if (is_query || token >= num_tokens) continue;
        const long long slot = batch.slots[share.start + token];
        uint4* cache = (is_value ? cached_values : cached_keys) + (slot * KV_HEADS + share.kv_head) * CHUNKS + chunk;
        cache[0] = first, cache[HALF] = second;
    }
}

// Over the 8 keys of a product that threads with the same queries hold.
__device__ __forceinline__ float highest(float x)
{
    #pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}
__device__ __forceinline__ float total(float x)
{
    #pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

// What a tile's keys weigh for each query, by its own highest score.
__device__ __forceinline__ void weigh(AttentionMemory& memory, Keys& keys, const Share& share, int tile, float scale,
                                      const Thread& me)
{
    const bool is_new = tile == 0;
    if (is_new)
        #pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) {
            keys.part[i][0] = memory.new_keys[place(me.token, 4 * i + me.pair)];
            keys.part[i][1] = make_uint4(0, 0, 0, 0);
        }
    #pragma unroll 1
    for (int group = 0; group < QUERY_TILES; group++) {
        float scores[4] = {0, 0, 0, 0};  // of keys `token` and 8 more, each for two queries
        #pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) {
            const uint4 query = memory.queries[place(group * 8 + me.token, 4 * i + me.pair)];
            const uint4 one = keys.part[i][0], two = keys.part[i][1];
            multiply_add(scores, one.x, two.x, one.y, two.y, query.x, query.y);
            multiply_add(scores, one.z, two.z, one.w, two.w, query.z, query.w);
        }
        float weights[4];
        #pragma unroll
        for (int which = 0; which < 2; which++) {
            const int query = group * 8 + 2 * me.pair + which;
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const int key = me.token + 8 * half;
                const bool is_seen = is_new ? key < share.num_new && key <= query / GROUP
                                            : (tile - 1) * KEYS + key < share.num_old;
                float& score = scores[2 * half + which];
                score = is_seen ? score * scale : lowest();
            }
            const float peak = highest(fmaxf(scores[which], scores[2 + which]));
            const float shift = peak == lowest() ? 0 : peak;
            weights[which] = power_of_two(scores[which] - shift);
            weights[2 + which] = power_of_two(scores[2 + which] - shift);
            const float sum = total(weights[which] + weights[2 + which]);
            if (me.token == 0) memory.peaks[me.warp][query] = peak, memory.totals[me.warp][query] = sum;
        }
        u32* to = memory.weights[me.warp * KEYS + me.token] + group * 4 + me.pair;
        to[0] = rounded(weights[0], weights[1]);
        to[8 * WEIGHTS_WIDTH] = rounded(weights[2], weights[3]);
    }
}

struct Folded { float results[QUERY_TILES][4], peaks[QUERY_TILES][2], totals[QUERY_TILES][2]; };

// Adds a tile's values, in this warp's 16 dimensions.
__device__ __forceinline__ void fold(Folded& folded, const AttentionMemory& memory, const uint4* values, int slot,
                                     const Thread& me)
{
    u32 a[4];
    const int matrix = me.lane / 8;
    load_transposed(a, address(values + place(slot * KEYS + matrix / 2 * 8 + me.lane % 8, 2 * me.warp + matrix % 2)));
    #pragma unroll
    for (int group = 0; group < QUERY_TILES; group++) {
        u32 b[2];
        load_transposed(b, address(memory.weights[slot * KEYS + me.lane % KEYS] + group * 4));
        float more[4] = {0, 0, 0, 0};
        multiply_add(more, a[0], a[1], a[2], a[3], b[0], b[1]);
        #pragma unroll
        for (int which = 0; which < 2; which++) {
            const int query = group * 8 + 2 * me.pair + which;
            const float theirs = memory.peaks[slot][query], mine = folded.peaks[group][which];
            const float peak = fmaxf(mine, theirs), shift = peak == lowest() ? 0 : peak;
            const float keep = power_of_two(mine - shift), add = power_of_two(theirs - shift);
            folded.peaks[group][which] = peak;
            folded.totals[group][which] = folded.totals[group][which] * keep + memory.totals[slot][query] * add;
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                float& result = folded.results[group][2 * half + which];
                result = result * keep + more[2 * half + which] * add;
            }
        }
    }
}

// `keys` and `values` have been asked for as far as they are in the cache, from the split's first tile on.
__device__ __forceinline__ void attend(AttentionMemory& memory, Keys& keys, uint4* values, const Share& share,
                                       const Batch& batch, const Partials& partials, const uint4* cached_keys,
                                       const uint4* cached_values, const Thread& me)
{
    Folded folded;
    #pragma unroll
    for (int group = 0; group < QUERY_TILES; group++)
        for (int which = 0; which < 4; which++) {
            folded.results[group][which] = 0;
            folded.peaks[group][which / 2] = lowest(), folded.totals[group][which / 2] = 0;
        }
    for (int first = share.begin; first < share.end; first += WARPS) {
        if (first > share.begin) {
            consumers_meet();  // which have done with the tiles before
            ask_for_tile(keys, values, share, first, cached_keys, cached_values, me);
        }
        if (first + me.warp < share.end) weigh(memory, keys, share, first + me.warp, batch.scale, me);
        await_copies();
        consumers_meet();
        if (me.warp < HEAD_DIM / 16)
            for (int slot = 0; slot < WARPS && first + slot < share.end; slot++) fold(folded, memory, values, slot, me);
    }
    if (me.warp >= HEAD_DIM / 16) return;
    u32* results = partials.results + blockIdx.x * QUERIES * HEAD_DIM + me.warp * 16 + me.token;
    #pragma unroll
    for (int group = 0; group < QUERY_TILES; group++)
        #pragma unroll
        for (int which = 0; which < 2; which++) {
            const int query = group * 8 + 2 * me.pair + which;
            store(results + query * HEAD_DIM, __float_as_uint(folded.results[group][which]));
            store(results + query * HEAD_DIM + 8, __float_as_uint(folded.results[group][2 + which]));
            if (me.warp == 0 && me.token == 0)
                store(partials.sums + (blockIdx.x * QUERIES + query) * 2, __float_as_uint(folded.peaks[group][which]),
                      __float_as_uint(folded.totals[group][which]));
        }
}

// Weighs what the splits of a row have found; each does so for some of the queries' dimensions.
__device__ __forceinline__ void combine(u32* attended, const Share& share, int num_splits, const Partials& partials)
{
    constexpr int PAIRS = HEAD_DIM / 2;
    const int all = share.num_tokens * GROUP * PAIRS, each = (all + num_splits * 32 - 1) / (num_splits * 32) * 32;
    const int begin = share.split * each, end = min(begin + each, all);
    for (int i = begin + threadIdx.x; i < end; i += CONSUMERS) {
        const int query = i / PAIRS, pair = i % PAIRS;
        const int at = share.item * num_splits * QUERIES + query;
        const u32 *from_sums = partials.sums + at * 2, *from_results = partials.results + at * HEAD_DIM + pair * 2;
        u32 sums[MAX_SPLITS][2], results[MAX_SPLITS][2];
        #pragma unroll
        for (int split = 0; split < MAX_SPLITS; split++) {
            sums[split][0] = __float_as_uint(lowest()), sums[split][1] = 0;
            results[split][0] = results[split][1] = 0;
        }
        look_until([&] {
            #pragma unroll
            for (int split = 0; split < MAX_SPLITS; split++)
                if (split < num_splits) {
                    load(sums[split], from_sums + split * QUERIES * 2);
                    load(results[split], from_results + split * QUERIES * HEAD_DIM);
                }
            return are_there(sums) && are_there(results);
        });
        float peak = lowest(), total = 0, first = 0, second = 0;
        #pragma unroll
        for (int split = 0; split < MAX_SPLITS; split++) peak = fmaxf(peak, __uint_as_float(sums[split][0]));
        const float shift = peak == lowest() ? 0 : peak;
        #pragma unroll
        for (int split = 0; split < MAX_SPLITS; split++) {
            const float weight = power_of_two(__uint_as_float(sums[split][0]) - shift);
            total += weight * __uint_as_float(sums[split][1]);
            first += weight * __uint_as_float(results[split][0]), second += weight * __uint_as_float(results[split][1]);
        }
        const float scale = total == 0 ? 0 : __fdividef(1, total);  // padding attends to nothing
        const int column = (share.kv_head * GROUP + query % GROUP) * HEAD_DIM + 2 * pair;
        store(&handed_on<HEADS * HEAD_DIM>(attended, column, share.start + query / GROUP),
              rounded(first * scale, second * scale));
    }
}

// Nothing, for tokens behind those of the last row.
__device__ __forceinline__ void attend_to_nothing(u32* attended, const Share& share, const Batch& batch, int num_tokens)
{
    if (share.item / KV_HEADS < batch.num_rows - 1 || share.split) return;
    constexpr int PAIRS = GROUP * HEAD_DIM / 2;
    const int first = batch.query_starts[batch.num_rows];
    for (int i = threadIdx.x; i < (num_tokens - first) * PAIRS; i += CONSUMERS) {
        const int column = share.kv_head * GROUP * HEAD_DIM + i % PAIRS * 2;
        store(&handed_on<HEADS * HEAD_DIM>(attended, column, first + i / PAIRS), 0);
    }
}
