// A linear layer of some ten or hundred tokens, y = x W^T: tiles are as large as they must be for each multiprocessor to
// have one, or a share of the input's columns of one.
//
// One thread brings weights through a ring, as far ahead as it has room, and before the kernel in front has ended; another
// brings tokens, which come from L2, through a short one. The blocks of a cluster multiply the same tokens by weights that
// are neighbours, or the same weights by tokens that are (WEIGHTS_SHARED): each asks for some of what they share, and all
// get it. Two groups of four warps multiply 64 rows each, of tokens or of weights (WEIGHTS_FIRST), by all of the other;
// 64 rows more, or the only ones, are multiplied by half of the other in each group.
//
// linear_multicast.py defines TILE, rows of weights; TOKENS of a tile, padding included; WEIGHTS_FIRST; WEIGHT_SLOTS;
// TOKEN_SLOTS; CLUSTER; WEIGHTS_SHARED; KIND. A grid is tiles of weights by splits by tiles of tokens.
#include "ring.cuh"

enum Kind { PLAIN, SUMS, GATED };  // rounded; fp32 [splits, tokens, columns]; silu(gate) * up

constexpr int ROWS = WEIGHTS_FIRST ? TILE : TOKENS, COLUMNS = WEIGHTS_FIRST ? TOKENS : TILE;  // of products
constexpr int MAIN_ROWS = ROWS / 128 * 128;  // 64 for each group
constexpr int MORE = ROWS > MAIN_ROWS ? COLUMNS / 2 : 0;  // of a group's products for the rows behind those
constexpr int GROUPS = 2, CONSUMERS = GROUPS * 128;
constexpr int WEIGHT_BYTES = TILE * 128, TOKEN_BYTES = TOKENS * 128;  // of 64 columns of the input
constexpr int GATE_TILE = KIND == GATED ? TILE / 2 : TILE;  // columns of the output
static_assert((ROWS == 64 || ROWS == 128 || ROWS == 192) && COLUMNS % (MORE ? 16 : 8) == 0 && COLUMNS <= 256, "products");
static_assert(KIND != GATED || WEIGHTS_FIRST || MORE % 16 == 0, "a group has gates and what they multiply");
constexpr int WEIGHT_SHARERS = WEIGHTS_SHARED ? CLUSTER : 1, TOKEN_SHARERS = WEIGHTS_SHARED ? 1 : CLUSTER;  // blocks
static_assert(TOKENS % (8 * TOKEN_SHARERS) == 0 && TILE % (8 * WEIGHT_SHARERS) == 0, "boxes begin where swizzling does");
static_assert(KIND != GATED || TILE % (16 * WEIGHT_SHARERS) == 0, "gates and what they multiply take turns, 8 rows each");
constexpr int FEW_REGISTERS = 24, MANY_REGISTERS = 240;
constexpr bool SHARES_REGISTERS = TOKENS > 64;  // fewer sums leave room for the kernel in front to run beside

struct Product {
    void* out;
    const unsigned short* bias;  // bf16, or null
    int num_tokens, num_columns, size;  // size: of the input
};

#ifndef STAND_INS
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap& map, int column, int eights, u32 barrier, u64 policy)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 ::"r"(to), "l"(&map), "r"(column), "r"(0), "r"(0), "r"(eights), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_rows_to_all(u32 to, const TensorMap& map, int column, int eights, u32 barrier,
                                                 int blocks, u64 policy)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;"
                 ::"r"(to), "l"(&map), "r"(column), "r"(0), "r"(0), "r"(eights), "r"(barrier), "h"((short)blocks),
                   "l"(policy) : "memory");
}
__device__ __forceinline__ void copy_tokens(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64 policy)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}
__device__ __forceinline__ u64 read_often()
{
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Products of 64 x 16 by 16 x N, as instructions.cuh has them for fewer columns.
#define FOUR(i) "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
#define SUMS_OF_32(i) FOUR(i), FOUR(i + 1), FOUR(i + 2), FOUR(i + 3)
#define NAMES_8 "%0,%1,%2,%3"
#define NAMES_16 NAMES_8 ",%4,%5,%6,%7"
#define NAMES_24 NAMES_16 ",%8,%9,%10,%11"
#define NAMES_32 NAMES_24 ",%12,%13,%14,%15"
#define NAMES_40 NAMES_32 ",%16,%17,%18,%19"
#define NAMES_48 NAMES_40 ",%20,%21,%22,%23"
#define NAMES_64 NAMES_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_96 NAMES_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_112 NAMES_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define NAMES_128 NAMES_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_160 NAMES_128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES_192 NAMES_160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_224 NAMES_192 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define NAMES_256 NAMES_224 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS_8 FOUR(0)
#define SUMS_16 SUMS_8, FOUR(1)
#define SUMS_24 SUMS_16, FOUR(2)
#define SUMS_32 SUMS_OF_32(0)
#define SUMS_40 SUMS_32, FOUR(4)
#define SUMS_48 SUMS_40, FOUR(5)
#define SUMS_64 SUMS_OF_32(0), SUMS_OF_32(4)
#define SUMS_96 SUMS_64, SUMS_OF_32(8)
#define SUMS_112 SUMS_96, FOUR(12), FOUR(13)
#define SUMS_128 SUMS_96, SUMS_OF_32(12)
#define SUMS_160 SUMS_128, SUMS_OF_32(16)
#define SUMS_192 SUMS_160, SUMS_OF_32(20)
#define SUMS_224 SUMS_192, SUMS_OF_32(24)
#define SUMS_256 SUMS_224, SUMS_OF_32(28)
#define PRODUCT(N, A, B, ONE) \
    asm volatile("{ .reg .pred add; setp.ne.u32 add, %" #ONE ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32.bf16.bf16 {" NAMES_##N "}, %" #A ", %" #B ", add, 1, 1, 0, 0; }" \
                 : SUMS_##N : "l"(rows), "l"(columns), "r"(1))
template <int TILES> __device__ __forceinline__ void multiply_add(float (&sums)[TILES][4], u64 rows, u64 columns)
{
    constexpr int N = TILES * 8;
    static_assert((N <= 48 || N == 64 || N == 96 || N == 112 || N == 128 || N == 160 || N == 192 || N == 224 || N == 256),
                  "columns");
    if constexpr (N == 8) PRODUCT(8, 4, 5, 6);
    if constexpr (N == 16) PRODUCT(16, 8, 9, 10);
    if constexpr (N == 24) PRODUCT(24, 12, 13, 14);
    if constexpr (N == 32) PRODUCT(32, 16, 17, 18);
    if constexpr (N == 40) PRODUCT(40, 20, 21, 22);
    if constexpr (N == 48) PRODUCT(48, 24, 25, 26);
    if constexpr (N == 64) PRODUCT(64, 32, 33, 34);
    if constexpr (N == 96) PRODUCT(96, 48, 49, 50);
    if constexpr (N == 112) PRODUCT(112, 56, 57, 58);
    if constexpr (N == 128) PRODUCT(128, 64, 65, 66);
    if constexpr (N == 160) PRODUCT(160, 80, 81, 82);
    if constexpr (N == 192) PRODUCT(192, 96, 97, 98);
    if constexpr (N == 224) PRODUCT(224, 112, 113, 114);
    if constexpr (N == 256) PRODUCT(256, 128, 129, 130);
}
#endif

template <int TILES> __device__ __forceinline__ void clear(float (&sums)[TILES][4])
{
    #pragma unroll
    for (int i = 0; i < TILES; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;
}
template <int TILES> __device__ __forceinline__ void forget(float (&sums)[TILES][4])  // what they were
{
    #pragma unroll
    for (int i = 0; i < TILES; i++)
        for (int j = 0; j < 4; j++) forget(sums[i][j]);
}

using WeightRing = RingOf<WEIGHT_SLOTS, WEIGHT_BYTES>;
using TokenRing = RingOf<TOKEN_SLOTS, TOKEN_BYTES>;
struct Rings {
    WeightRing weights;
    TokenRing tokens;
};
struct Steps { int first, last; };  // of 64 columns of the input, of this block

__device__ __forceinline__ int rank() { return (WEIGHTS_SHARED ? blockIdx.z : blockIdx.x) % CLUSTER; }
constexpr int ALL_BLOCKS = (1 << CLUSTER) - 1;

__device__ __forceinline__ void fetch_weights(WeightRing ring, const TensorMap& map, Steps steps)
{
    // the cache is better used for what is read again
    const u64 policy = read_once();
    constexpr int SHARE = TILE / WEIGHT_SHARERS, EIGHTS = GATE_TILE / WEIGHT_SHARERS / 8;
    const int mine = WEIGHTS_SHARED ? rank() : 0, eights = blockIdx.x * (GATE_TILE / 8) + mine * EIGHTS;
    for (int step = steps.first; step < steps.last; step++) {
        wait(ring.freed(), ring.parity ^ 1);
        expect(ring.filled(), WEIGHT_BYTES);
        const u32 to = ring.at() + mine * SHARE * 128;
        if (WEIGHT_SHARERS > 1) copy_rows_to_all(to, map, step * 64, eights, ring.filled(), ALL_BLOCKS, policy);
        else copy_rows(to, map, step * 64, eights, ring.filled(), policy);
        ring.advance();
    }
}

__device__ __forceinline__ void fetch_tokens(TokenRing ring, const TensorMap& map, Steps steps)
{
    constexpr int SHARE = TOKENS / TOKEN_SHARERS;
    const int mine = WEIGHTS_SHARED ? 0 : rank(), token = blockIdx.z * TOKENS + mine * SHARE;
    const u64 policy = read_often();
    await_kernel_in_front();
    for (int step = steps.first; step < steps.last; step++) {
        wait(ring.freed(), ring.parity ^ 1);
        expect(ring.filled(), TOKEN_BYTES);
        const u32 to = ring.at() + mine * SHARE * 128;
        if (TOKEN_SHARERS > 1) copy_to_all(to, map, step * 64, token, ring.filled(), ALL_BLOCKS);
        else copy_tokens(to, map, step * 64, token, ring.filled(), policy);
        ring.advance();
    }
}

struct Sums {  // of a group
    float main[MAIN_ROWS ? COLUMNS / 8 : 1][4];
    float more[MORE ? MORE / 8 : 1][4];
};

template <int SHARERS> __device__ __forceinline__ void free_slot(u32 barrier, int lane)
{
    if (SHARERS == 1 && lane == 0) arrive(barrier);
    if (SHARERS > 1 && lane < SHARERS) arrive_at(barrier, lane);
}

__device__ __forceinline__ void multiply(Sums& sums, Rings rings, Steps steps, int group)
{
    clear(sums.main), clear(sums.more);
    WeightRing& weights = rings.weights;
    TokenRing& tokens = rings.tokens;
    const int lane = threadIdx.x % 32;
    u32 read_weights = 0, read_tokens = 0;  // slots that the products before these read
    for (int step = steps.first; step < steps.last; step++) {
        wait(weights.filled(), weights.parity);
        wait(tokens.filled(), tokens.parity);
        __syncwarp();
        begin_products();
        #pragma unroll
        for (int part = 0; part < 64; part += 16) {  // of 64 columns
            const u32 rows = (WEIGHTS_FIRST ? weights.at() : tokens.at()) + part * 2;
            const u32 columns = (WEIGHTS_FIRST ? tokens.at() : weights.at()) + part * 2;
            if constexpr (MAIN_ROWS > 0)
                multiply_add(sums.main, described(rows + group * (64 * 128)), described(columns));
            if constexpr (MORE > 0)
                multiply_add(sums.more, described(rows + MAIN_ROWS * 128), described(columns + group * (MORE * 128)));
        }
        commit_products();
        await_products<1>();
        if (read_weights) {
            free_slot<WEIGHT_SHARERS>(read_weights, lane);
            free_slot<TOKEN_SHARERS>(read_tokens, lane);
        }
        read_weights = weights.freed(), read_tokens = tokens.freed();
        weights.advance(), tokens.advance();
    }
    await_products<0>();
    forget(sums.main), forget(sums.more);  // else they might be read before they are there
}

// Rounded between the steps, as models are in training.
__device__ __forceinline__ u32 gated(float2 gates, float2 ups)
{
    const u32 gate = rounded(gates.x, gates.y), up = rounded(ups.x, ups.y);
    const u32 activated = rounded(__fdividef(low(gate), 1 + __expf(-low(gate))),
                                  __fdividef(high(gate), 1 + __expf(-high(gate))));
    return rounded(low(activated) * low(up), high(activated) * high(up));
}

__device__ __forceinline__ void store(const Product& p, int token, int column, float value)
{
    if (token >= p.num_tokens) return;
    if (KIND == SUMS) ((float*)p.out)[((long long)blockIdx.y * p.num_tokens + token) * p.num_columns + column] = value;
    else ((unsigned short*)p.out)[(long long)token * p.num_columns + column] = rounded(value, value);
}
__device__ __forceinline__ void store(const Product& p, int token, int column, float2 pair)
{
    if (token >= p.num_tokens) return;
    const long long at = ((KIND == SUMS ? (long long)blockIdx.y * p.num_tokens : 0) + token) * p.num_columns + column;
    if (KIND == SUMS) *(float2*)((float*)p.out + at) = pair;
    else *(u32*)((unsigned short*)p.out + at) = rounded(pair.x, pair.y);
}

// Sums of 64 rows by TILES * 8 columns, which begin at row and column of the tile.
template <int TILES>
__device__ __forceinline__ void write(const Product& p, const float (&sums)[TILES][4], int first_row, int first_column)
{
    const int lane = threadIdx.x % 32, row = first_row + threadIdx.x / 32 % 4 * 16 + lane / 4, pair = lane % 4 * 2;
    const int tile = blockIdx.x * GATE_TILE;
    const bool biased = p.bias && blockIdx.y == 0;
    auto bias = [&](int column) { return __uint_as_float((u32)p.bias[column] << 16); };
    if constexpr (WEIGHTS_FIRST) {
        const int column = tile + (KIND == GATED ? row / 16 * 8 + row % 8 : row);
        const int second = KIND == GATED ? column + p.num_columns : column + 8;
        const float first_bias = biased ? bias(column) : 0, second_bias = biased ? bias(second) : 0;
        #pragma unroll
        for (int i = 0; i < TILES; i++) {
            const float2 a = make_float2(sums[i][0] + first_bias, sums[i][1] + first_bias);
            const float2 b = make_float2(sums[i][2] + second_bias, sums[i][3] + second_bias);
            const int token = blockIdx.z * TOKENS + first_column + i * 8 + pair;
            if constexpr (KIND == GATED) {
                const u32 both = gated(a, b);
                store(p, token, column, low(both)), store(p, token + 1, column, high(both));
            } else {
                store(p, token, column, a.x), store(p, token + 1, column, a.y);
                store(p, token, second, b.x), store(p, token + 1, second, b.y);
            }
        }
    } else {
        constexpr int EVERY = KIND == GATED ? 2 : 1;
        #pragma unroll
        for (int i = 0; i < TILES; i += EVERY) {
            const int column = tile + (first_column / 8 + i) / EVERY * 8 + pair;
            #pragma unroll
            for (int j = 0; j < 4; j += 2) {
                float2 a = make_float2(sums[i][j], sums[i][j + 1]);
                if (biased) a.x += bias(column), a.y += bias(column + 1);
                if constexpr (KIND == GATED) {
                    float2 b = make_float2(sums[i + 1][j], sums[i + 1][j + 1]);
                    if (biased) b.x += bias(p.num_columns + column), b.y += bias(p.num_columns + column + 1);
                    const u32 both = gated(a, b);
                    a = make_float2(low(both), high(both));
                }
                store(p, blockIdx.z * TOKENS + row + j * 4, column, a);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) multicast_linear(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens, const Product p)
{
    constexpr int RINGS_BYTES = WEIGHT_SLOTS * WEIGHT_BYTES + TOKEN_SLOTS * TOKEN_BYTES;
    const u32 memory = address(shared_memory()), barriers = memory + RINGS_BYTES;
    const u32 token_barriers = barriers + WEIGHT_SLOTS * 16;
    const Rings rings{{memory, barriers, barriers + WEIGHT_SLOTS * 8},
                      {memory + WEIGHT_SLOTS * WEIGHT_BYTES, token_barriers, token_barriers + TOKEN_SLOTS * 8}};
    const int group = threadIdx.x / 128, all_steps = p.size / 64, split = blockIdx.y, splits = gridDim.y;
    const Steps steps{all_steps * split / splits, all_steps * (split + 1) / splits};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < WEIGHT_SLOTS; slot++)
            init(rings.weights.filled_barriers + slot * 8, 1),
                init(rings.weights.freed_barriers + slot * 8, WEIGHT_SHARERS * GROUPS * 4);
        for (int slot = 0; slot < TOKEN_SLOTS; slot++)
            init(rings.tokens.filled_barriers + slot * 8, 1),
                init(rings.tokens.freed_barriers + slot * 8, TOKEN_SHARERS * GROUPS * 4);
        show_barriers_to_copies();
    }
    cluster_meets();
    if (group == GROUPS) {
        if constexpr (SHARES_REGISTERS) keep_registers<FEW_REGISTERS>();
        if (threadIdx.x == CONSUMERS) fetch_weights(rings.weights, weights, steps);
        if (threadIdx.x == CONSUMERS + 32) fetch_tokens(rings.tokens, tokens, steps);
        cluster_meets();
    } else {
        if constexpr (SHARES_REGISTERS) take_registers<MANY_REGISTERS>();
        Sums sums;
        multiply(sums, rings, steps, group);
        let_next_kernel_start();
        if constexpr (MAIN_ROWS > 0) write(p, sums.main, group * 64, 0);
        if constexpr (MORE > 0) write(p, sums.more, MAIN_ROWS, group * MORE);
        cluster_meets();  // nobody writes to a block that has ended
    }
}
