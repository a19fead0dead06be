// Products of 9 to 64 tokens: those of linears.cuh, with tokens as the 64 rows of Hopper's products of warp groups, and
// a block's rows of weights, which are a multiple of 8, as their columns.
//
// Tokens come by the copy engine too, through a ring of their own, since they are there only when blocks have met while
// weights need not wait. The blocks of a cluster multiply the same tokens: each asks for some, and all get them. Two
// groups of four warps multiply; each takes half of every 64 columns, and their sums are added up.
//
// The ring of tokens is empty between a matrix and the next meeting, and is the block's scratch memory then.
#pragma once
#include "linears.cuh"

constexpr int TOKEN_SLOTS = 3, TOKEN_SLOT_BYTES = SCRATCH_BYTES / TOKEN_SLOTS;
constexpr int TOKEN_BYTES = TOKENS * 128;  // of 64 columns
static_assert(TOKENS % 16 == 0 && TOKENS <= 64, "tokens");
static_assert(TOKEN_BYTES <= TOKEN_SLOT_BYTES && TOKEN_SLOT_BYTES % 1024 == 0, "slots");
static_assert(SLOT_BYTES >= 64 * 128, "products read 64 rows from where the last tokens stand");

using TokenRing = RingOf<TOKEN_SLOTS, TOKEN_SLOT_BYTES>;
struct Rings {
    Ring weights;
    TokenRing tokens;
};

// Chunks of 64 columns that come at once, of those in a stage of weights.
__device__ constexpr int token_chunks(int chunks)
{
    int most = chunks;
    while (chunks % most || most * TOKEN_BYTES > TOKEN_SLOT_BYTES) most--;
    return most;
}

// All tokens, some columns at a time; of each 64 columns one block of the cluster asks for all of it.
template <int SIZE, int CHUNKS>
__device__ __forceinline__ void fetch_tokens(TokenRing& ring, const TensorMap& map)
{
    constexpr int AT_ONCE = token_chunks(CHUNKS);
    for (int first = 0; first < SIZE / 64; first += AT_ONCE) {
        wait(ring.freed(), ring.parity ^ 1);  // by all blocks of the cluster
        expect(ring.filled(), TOKEN_BYTES * AT_ONCE);
        for (int chunk = 0; chunk < AT_ONCE; chunk++)
            if ((first + chunk) % CLUSTER == blockIdx.x % CLUSTER)
                copy_to_all(ring.at() + chunk * TOKEN_BYTES, map, (first + chunk) * 64, 0, ring.filled(),
                            (1 << CLUSTER) - 1);
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
    constexpr int LEFT = TILES - FIRST, COUNT = LEFT >= 8 ? 8 : LEFT >= 4 ? 4 : LEFT >= 2 ? 2 : 1;
    multiply_add_64<FIRST, COUNT>(sums, described(tokens), described(weights + FIRST * TILE));
    if constexpr (LEFT > COUNT) multiply_add_rows<FIRST + COUNT>(sums, tokens, weights);
}

// This group's share of the sums of TILES x 8 rows. Of each four two are of one token, and two of that 8 further on.
template <int SIZE, int TILES, int CHUNKS>
__device__ __forceinline__ void multiply(float (&sums)[TILES][4], Rings& rings, const Thread& me)
{
    constexpr int AT_ONCE = token_chunks(CHUNKS);
    static_assert(SIZE % (64 * CHUNKS) == 0 && TILES * TILE * CHUNKS <= SLOT_BYTES, "stages");
    Ring& weights = rings.weights;
    TokenRing& tokens = rings.tokens;
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0;
    const u32 half = me.warp / 4 * 64;  // of 128 bytes
    u32 read_tokens = 0, read_weights = 0;  // slots that the products before these read
    auto free_read = [&] {
        if (read_tokens && me.lane < CLUSTER) arrive_at(read_tokens, me.lane);
        if (read_weights && me.lane == 0) arrive(read_weights);
    };
    for (int stage = 0; stage < SIZE / 64 / CHUNKS; stage++) {
        wait(weights.filled(), weights.parity);
        for (int first = 0; first < CHUNKS; first += AT_ONCE) {
            wait(tokens.filled(), tokens.parity);
            __syncwarp();
            begin_products();
            #pragma unroll
            for (int chunk = 0; chunk < AT_ONCE; chunk++)
                #pragma unroll
                for (int step = 0; step < 2; step++)
                    multiply_add_rows<0>(sums, tokens.at() + chunk * TOKEN_BYTES + half + step * 32,
                                         weights.at() + (first + chunk) * (TILES * TILE) + half + step * 32);
            commit_products();
            await_products<1>();
            free_read();
            read_tokens = tokens.freed(), read_weights = first + AT_ONCE == CHUNKS ? weights.freed() : 0;
            tokens.advance();
        }
        weights.advance();
    }
    await_products<0>();
    free_read();
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        #pragma unroll
        for (int i = 0; i < 4; i++) forget(sums[tile][i]);  // else they might be read before they are there
}

// Adds up the groups' shares, and calls `use(tile, token, values)` once for each product; SETS 2: with the values of
// tile and tile + TILES / 2. A tile always comes to the same threads.
template <int SETS, int TILES, class Use>
__device__ __forceinline__ void add_up(const float (&sums)[TILES][4], float4* scratch, const Thread& me, Use use)
{
    constexpr int ITEMS = TILES / SETS;
    static_assert(TILES * 128 * sizeof(float4) <= SCRATCH_BYTES, "scratch");
    float4* shares = scratch + threadIdx.x % 128;
    consumers_meet();  // which have read all tokens
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        if (tile % ITEMS % 2 != me.warp / 4)
            shares[tile * 128] = make_float4(sums[tile][0], sums[tile][1], sums[tile][2], sums[tile][3]);
    consumers_meet();
    if (me.warp % 4 >= TOKENS / 16) return;
    int token = me.warp % 4 * 16 + me.token;
    forget(token);  // else what follows from it would be kept from layer to layer, which registers have no room for
    #pragma unroll
    for (int item = 0; item < ITEMS; item++) {
        if (item % 2 != me.warp / 4) continue;
        float2 first[SETS], second[SETS];
        #pragma unroll
        for (int g = 0; g < SETS; g++) {
            const float(&mine)[4] = sums[item + g * ITEMS];
            const float4 other = shares[(item + g * ITEMS) * 128];
            first[g] = make_float2(mine[0] + other.x, mine[1] + other.y);
            second[g] = make_float2(mine[2] + other.z, mine[3] + other.w);
        }
        use(item, token, first);
        use(item, token + 8, second);
    }
}
