// The attention of attention.cuh for many rows: each warp keeps results of its own for the tiles that it takes, every
// eighth of a split, so that warps need not meet between them, and has the next two tiles on the way. What the warps of
// a block have found is added up at the end, in a fixed order.
#pragma once
#include "attention.cuh"

struct QueryMemory {
    uint4 queries[QUERIES * CHUNKS], new_keys[ROW_TOKENS * CHUNKS];
    float peaks[WARPS][QUERIES], totals[WARPS][QUERIES];
    float2 sums[QUERIES];  // of all warps: the highest score, and the total weight
};

constexpr int STAGE_VALUES = VALUES_BYTES / sizeof(uint4);  // of a tile for each warp, of which there are two
constexpr int RESULTS_WIDTH = 68;                           // of 64 dimensions, padded
static_assert(2 * VALUES_BYTES <= SCRATCH_BYTES, "values of tiles stand where tokens come to at other times");
static_assert(WARPS * QUERIES * RESULTS_WIDTH * 4 <= SCRATCH_BYTES, "results of half a head too");

struct Pages { int next[4]; };  // of a warp's next tiles, as of `page_of`

__device__ __forceinline__ Pages first_pages(const Share& share, const Thread& me)
{
    Pages pages;
    #pragma unroll
    for (int i = 0; i < 4; i++)
        pages.next[i] = share.is_any ? page_of(share, share.begin + me.warp + i * WARPS) : -1;
    return pages;
}

// Of a warp's tiles the values of two are on their way at any time, and the keys of as many as registers have room for.
constexpr int KEY_SETS = QUERY_TILES > 2 ? 1 : 2;
struct Ahead {
    Keys keys[KEY_SETS];
    Pages pages;
};

__device__ __forceinline__ void ask_for_first(Ahead& ahead, uint4* values, const Share& share, const Pages& pages,
                                              const uint4* cached_keys, const uint4* cached_values, const Thread& me)
{
    int thread = threadIdx.x;
    forget(thread);
    ahead.pages = pages;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        if (pages.next[i] >= 0) {
            const Tile tile(share, share.begin + me.warp + i * WARPS, pages.next[i]);
            if (i < KEY_SETS) ask_for_keys(ahead.keys[i], tile, cached_keys, thread % 32u);
            ask_for_values(values + i * STAGE_VALUES, tile, cached_values, thread / 32u, thread % 32u);
        }
        close_copies();
    }
}

struct Found {  // by a warp; totals are of a thread's keys
    float results[HEAD_DIM / 16][QUERY_TILES][4], peaks[QUERY_TILES][2], totals[QUERY_TILES][2];
};

// What a tile's keys weigh for each query, in pairs of keys, and what that does to what was found before.
__device__ __forceinline__ void weigh(u32 (&weights)[QUERY_TILES][2], Found& found,
                                      const float (&scores)[QUERY_TILES][4], const Share& share, int tile, float scale,
                                      const Thread& me)
{
    #pragma unroll
    for (int group = 0; group < QUERY_TILES; group++) {
        float mine[4], keep[2];
        #pragma unroll
        for (int which = 0; which < 2; which++) {
            const int query = group * 8 + 2 * me.pair + which;
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const int key = me.token + 8 * half;
                const bool is_seen = tile == 0 ? key < share.num_new && key <= query / GROUP
                                               : (tile - 1) * KEYS + key < share.num_old;
                mine[2 * half + which] = is_seen ? scores[group][2 * half + which] * scale : lowest();
            }
            const float peak = fmaxf(found.peaks[group][which], highest(fmaxf(mine[which], mine[2 + which])));
            const float shift = peak == lowest() ? 0 : peak;
            keep[which] = power_of_two(found.peaks[group][which] - shift);
            found.peaks[group][which] = peak;
            mine[which] = power_of_two(mine[which] - shift), mine[2 + which] = power_of_two(mine[2 + which] - shift);
            found.totals[group][which] = found.totals[group][which] * keep[which] + mine[which] + mine[2 + which];
        }
        #pragma unroll
        for (int part = 0; part < HEAD_DIM / 16; part++)
            #pragma unroll
            for (int i = 0; i < 4; i++) found.results[part][group][i] *= keep[i % 2];
        weights[group][0] = transposed(rounded(mine[0], mine[1]));
        weights[group][1] = transposed(rounded(mine[2], mine[3]));
    }
}

// `ask_for_first` has been called.
__device__ __forceinline__ void attend(Found& found, Ahead& ahead, uint4* values, const QueryMemory& memory,
                                       const Share& share, float scale, const uint4* cached_keys,
                                       const uint4* cached_values, const Thread& me)
{
    #pragma unroll
    for (int group = 0; group < QUERY_TILES; group++)
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            #pragma unroll
            for (int part = 0; part < HEAD_DIM / 16; part++) found.results[part][group][i] = 0;
            found.peaks[group][i / 2] = lowest(), found.totals[group][i / 2] = 0;
        }
    const int matrix = me.lane / 8;
    int(&next)[4] = ahead.pages.next;
    for (int first = share.begin + me.warp; first < share.end; first += 2 * WARPS)
        #pragma unroll
        for (int stage = 0; stage < 2; stage++) {
            const int tile = first + stage * WARPS;
            if (tile >= share.end) break;
            Keys& keys = ahead.keys[stage % KEY_SETS];
            if (tile == 0)
                #pragma unroll
                for (int i = 0; i < HEAD_DIM / 32; i++) {
                    keys.part[i][0] = memory.new_keys[place(me.token, 4 * i + me.pair)];
                    keys.part[i][1] = make_uint4(0, 0, 0, 0);
                }
            float scores[QUERY_TILES][4];  // of keys `token` and 8 more, each for two queries
            #pragma unroll
            for (int group = 0; group < QUERY_TILES; group++) {
                scores[group][0] = scores[group][1] = scores[group][2] = scores[group][3] = 0;
                #pragma unroll
                for (int i = 0; i < HEAD_DIM / 32; i++) {
                    const uint4 query = memory.queries[place(group * 8 + me.token, 4 * i + me.pair)];
                    const uint4 one = keys.part[i][0], two = keys.part[i][1];
                    multiply_add(scores[group], one.x, two.x, one.y, two.y, query.x, query.y);
                    multiply_add(scores[group], one.z, two.z, one.w, two.w, query.z, query.w);
                }
            }
            if (next[KEY_SETS] >= 0)
                ask_for_keys(keys, Tile(share, tile + KEY_SETS * WARPS, next[KEY_SETS]), cached_keys, me.lane);
            u32 weights[QUERY_TILES][2];
            weigh(weights, found, scores, share, tile, scale, me);
            await_closed_copies<1>();
            __syncwarp();
            #pragma unroll
            for (int part = 0; part < HEAD_DIM / 16; part++) {
                u32 a[4];
                load_transposed(a, address(values + stage * STAGE_VALUES + place(
                    me.warp * KEYS + matrix / 2 * 8 + me.lane % 8, 2 * part + matrix % 2)));
                #pragma unroll
                for (int group = 0; group < QUERY_TILES; group++)
                    multiply_add(found.results[part][group], a[0], a[1], a[2], a[3], weights[group][0],
                                 weights[group][1]);
            }
            __syncwarp();
            if (next[2] >= 0)
                ask_for_values(values + stage * STAGE_VALUES, Tile(share, tile + 2 * WARPS, next[2]), cached_values,
                               me.warp, me.lane);
            close_copies();
            for (int i = 0; i < 3; i++) next[i] = next[i + 1];
            next[3] = page_of(share, tile + 4 * WARPS);
        }
    await_copies();
}

// Adds up what the block's warps have found, and hands it on; a split's share of it is for `combine`.
__device__ __forceinline__ void add_up(Found& found, QueryMemory& memory, float* scratch, u32* attended,
                                       const Share& share, int num_splits, const Partials& partials, const Thread& me)
{
    #pragma unroll
    for (int group = 0; group < QUERY_TILES; group++)
        #pragma unroll
        for (int which = 0; which < 2; which++) {
            const int query = group * 8 + 2 * me.pair + which;
            const float sum = total(found.totals[group][which]);
            if (me.token) continue;
            memory.peaks[me.warp][query] = found.peaks[group][which], memory.totals[me.warp][query] = sum;
        }
    consumers_meet();  // which have done with values
    if (threadIdx.x < QUERIES) {
        float peak = lowest(), sum = 0;
        for (int warp = 0; warp < WARPS; warp++) peak = fmaxf(peak, memory.peaks[warp][threadIdx.x]);
        const float shift = peak == lowest() ? 0 : peak;
        for (int warp = 0; warp < WARPS; warp++)
            sum += memory.totals[warp][threadIdx.x] * power_of_two(memory.peaks[warp][threadIdx.x] - shift);
        memory.sums[threadIdx.x] = make_float2(peak, sum);
        if (num_splits > 1)
            store(partials.sums + (blockIdx.x * QUERIES + threadIdx.x) * 2, __float_as_uint(peak),
                  __float_as_uint(sum));
    }
    float keep[QUERY_TILES][2];
    #pragma unroll
    for (int group = 0; group < QUERY_TILES; group++)
        #pragma unroll
        for (int which = 0; which < 2; which++) {
            const int query = group * 8 + 2 * me.pair + which;
            float peak = lowest();
            #pragma unroll
            for (int warp = 0; warp < WARPS; warp++) peak = fmaxf(peak, memory.peaks[warp][query]);
            keep[group][which] = power_of_two(found.peaks[group][which] - (peak == lowest() ? 0 : peak));
        }
    #pragma unroll
    for (int first = 0; first < HEAD_DIM; first += 64) {
        if (first) consumers_meet();
        #pragma unroll
        for (int part = 0; part < 4; part++)
            #pragma unroll
            for (int group = 0; group < QUERY_TILES; group++)
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int query = group * 8 + 2 * me.pair + i % 2, dimension = part * 16 + me.token + i / 2 * 8;
                    scratch[(me.warp * QUERIES + query) * RESULTS_WIDTH + dimension] =
                        found.results[first / 16 + part][group][i] * keep[group][i % 2];
                }
        consumers_meet();
        for (int i = threadIdx.x; i < share.num_tokens * GROUP * 32; i += CONSUMERS) {
            const int query = i / 32, dimension = i % 32 * 2;
            float2 sum = make_float2(0, 0);
            #pragma unroll
            for (int warp = 0; warp < WARPS; warp++) {
                const float2 one = *(const float2*)(scratch + (warp * QUERIES + query) * RESULTS_WIDTH + dimension);
                sum.x += one.x, sum.y += one.y;
            }
            if (num_splits > 1) {
                store(partials.results + (blockIdx.x * QUERIES + query) * HEAD_DIM + first + dimension,
                      __float_as_uint(sum.x), __float_as_uint(sum.y));
                continue;
            }
            const float all = memory.sums[query].y, scale = all == 0 ? 0 : 1 / all;  // padding attends to nothing
            const int column = (share.kv_head * GROUP + query % GROUP) * HEAD_DIM + first + dimension;
            handed_on<HEADS * HEAD_DIM>(attended, column, share.start + query / GROUP) =
                rounded(sum.x * scale, sum.y * scale);
        }
    }
}
