// From one attention to the next in one kernel that never stops reading weights: output projection, norm, gated MLP,
// norm, and the next layer's q, k and v. Its twin in Python is streamed_layer_torch; streamed_layer.py defines the
// sizes: HIDDEN, QUERY, INNER, QKV; of each matrix the tiles of 8 rows that a block owns and the chunks of 64 columns
// in a stage; SLOTS, SLOT_BYTES, SCRATCH_BYTES; WITH_QKV, without which the last norm's result is what comes out.
//
// Every block owns rows of each matrix, whole, so that no sums cross blocks. One thread of it asks the copy engine for
// those rows, matrix after matrix, as fast as a ring of slots in shared memory has room. It waits for no result, so
// memory is read while blocks wait for each other. Eight warps multiply; each takes every eighth step of 16 columns,
// and their sums are added up in a fixed order.
//
// Blocks meet at a counter between matrices. What they hand on is kept in the order in which tensor cores take it
// (`pack`). A norm's scale multiplies the sums behind it, since its squares are known only when all blocks have met.
//
// Products are m16n8k16: tokens are the 16, of which 8 are used, rows of weights the 8.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { char bytes[128]; };

constexpr int TOKENS = 8, WARPS = 8, CONSUMERS = WARPS * 32;
constexpr int TILE = 1024;  // bytes of 8 rows x 64 columns
constexpr int HIDDEN_ROWS = HIDDEN_TILES * 8, INNER_ROWS = INNER_TILES * 8, QKV_ROWS = QKV_TILES * 8;
constexpr int HIDDEN_BLOCKS = HIDDEN / HIDDEN_ROWS, INNER_BLOCKS = INNER / INNER_ROWS, QKV_BLOCKS = QKV / QKV_ROWS;
constexpr int PASS_TILES = INNER_TILES / PASSES;  // of gates in a pass, and as many of what they multiply
constexpr u64 PATIENCE_NS = 4000000000ull;

struct Shared {
    u64 filled[SLOTS], freed[SLOTS];
    float scale[TOKENS];
    float gain[2][HIDDEN_ROWS];
    float squares[HIDDEN_TILES][TOKENS];
    u32 residual[HIDDEN_TILES][32];  // this block's columns of the stream
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "streamed_layer.py sets aside too little");

struct Thread {
    int warp, lane, token, pair;  // of a product a thread holds one token, columns 2 * pair and the next
    u32 offset;                   // of the row that it gives ldmatrix, swizzled as the copy engine does
    u32 never;                    // 0, which the compiler does not know
    bool is_live;                 // whether its token is one
};

#ifdef STAND_INS  // a test's, which needs no GPU
#include STAND_INS
#else
__device__ __forceinline__ unsigned char* shared_memory()
{
    extern __shared__ __align__(1024) unsigned char memory[];
    return memory;
}
__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
__device__ __forceinline__ u32 rounded(float first, float second)
{
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
__device__ __forceinline__ u64 nanoseconds()
{
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
__device__ __forceinline__ void init(u32 barrier, u32 count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void show_barriers_to_copies()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(u32 barrier)
{
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes)
{
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }"
                 ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool is_past(u32 barrier, u32 parity)
{
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ u64 read_once()
{
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64 policy)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}
// What other multiprocessors have written: L1 must not answer.
__device__ __forceinline__ u32 load_one(const u32* p)
{
    u32 x;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
__device__ __forceinline__ void load_two(u32 (&x)[2], const u32* p)
{
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(p));
}
__device__ __forceinline__ u64 acquired(const u64* p)
{
    u64 seen;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(p) : "memory");
    return seen;
}
__device__ __forceinline__ void load_matrices(u32 (&b)[4], u32 at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at));
}
__device__ __forceinline__ void load_matrices(u32 (&b)[2], u32 at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(at));
}
__device__ __forceinline__ void multiply_add(float (&sums)[4], const u32 (&x)[2], u32 first, u32 second)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %8, %5, %8}, {%6, %7}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(x[0]), "r"(x[1]), "r"(first), "r"(second), "r"(0));
}
__device__ __forceinline__ void forget(int& value) { asm volatile("" : "+r"(value)); }  // what the compiler knows of it
__device__ __forceinline__ void wait_for_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#endif

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ void wait(u32 barrier, u32 parity)
{
    if (is_past(barrier, parity)) return;
    const u64 start = nanoseconds();
    while (!is_past(barrier, parity))
        if (nanoseconds() - start > PATIENCE_NS) __trap();  // an error, not a hang
}

struct Ring {
    u32 slots, filled_barriers, freed_barriers;
    int slot = 0;
    u32 parity = 0;
    __device__ u32 at() const { return slots + slot * SLOT_BYTES; }
    __device__ u32 filled() const { return filled_barriers + slot * 8; }
    __device__ u32 freed() const { return freed_barriers + slot * 8; }
    __device__ void advance() { if (++slot == SLOTS) { slot = 0; parity ^= 1; } }
};

// The rows of one matrix that this block owns, some columns at a time. GATED: as many again, INNER rows further on.
template <int SIZE, int TILES, int CHUNKS, bool GATED>
__device__ __forceinline__ void fetch(Ring& ring, const TensorMap& map, int row, u64 policy)
{
    constexpr u32 BYTES = TILES * (GATED ? 2 : 1) * TILE;
    for (int column = 0; column < SIZE; column += CHUNKS * 64) {
        wait(ring.freed(), ring.parity ^ 1);
        expect(ring.filled(), BYTES * CHUNKS);
        #pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            const u32 to = ring.at() + chunk * BYTES;
            copy(to, map, column + chunk * 64, row, ring.filled(), policy);
            if (GATED) copy(to + TILES * TILE, map, column + chunk * 64, row + INNER, ring.filled(), policy);
        }
        ring.advance();
    }
}

// This thread's part of 8 tokens x 16 columns.
template <bool PACKED>
__device__ __forceinline__ void load(u32 (&x)[2], const u32* from, int size, int step, const Thread& me)
{
    x[0] = x[1] = 0;
    if (!me.is_live) return;
    if constexpr (PACKED) {
        load_two(x, from + (step * 32 + me.lane) * 2);
    } else {
        const u32* p = from + (me.token * size + step * 16) / 2 + me.pair;
        x[0] = load_one(p);
        x[1] = load_one(p + 4);
    }
}

__device__ __forceinline__ void pack(u32* to, int row, u32 pair, const Thread& me)
{
    to[(row / 16 * 32 + me.lane) * 2 + row / 8 % 2] = pair;
}

// This warp's share of the sums of TILES x 8 rows; of each four the first two are of tokens.
template <int SIZE, int TILES, int CHUNKS, bool PACKED>
__device__ __forceinline__ void multiply(float (&sums)[TILES][4], Ring& ring, const u32* from, const Thread& me)
{
    constexpr int STEPS = CHUNKS * 4, MINE = (STEPS + WARPS - 1) / WARPS, STAGES = SIZE / 64 / CHUNKS, AHEAD = 2;
    static_assert(SIZE % (64 * CHUNKS) == 0 && TILES * TILE * CHUNKS <= SLOT_BYTES, "stages");
    u32 x[AHEAD][MINE][2];  // of the next stages
    auto load_stage = [&](u32 (&to)[MINE][2], int stage) {
        #pragma unroll
        for (int i = 0; i < MINE; i++)
            if (STEPS % WARPS == 0 || me.warp + i * WARPS < STEPS)
                load<PACKED>(to[i], from, SIZE, stage * STEPS + me.warp + i * WARPS, me);
    };
    #pragma unroll
    for (int tile = 0; tile < TILES; tile++) sums[tile][0] = sums[tile][1] = sums[tile][2] = sums[tile][3] = 0;
    int stages = STAGES;
    forget(stages);  // else the loop would be unrolled whole
    #pragma unroll
    for (int ahead = 0; ahead < AHEAD; ahead++)
        if (ahead < STAGES) load_stage(x[ahead], ahead);
    for (int first = 0; first < stages; first += AHEAD) {
        #pragma unroll
        for (int ahead = 0; ahead < AHEAD; ahead++) {
            const int stage = first + ahead;
            if (STAGES % AHEAD && stage >= stages) break;
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
                    multiply_add(sums[tile], x[ahead][i], b[0], b[1]);
                    multiply_add(sums[tile + 1], x[ahead][i], b[2], b[3]);
                    seen ^= b[0];
                }
                if (TILES % 2) {
                    u32 b[2];
                    load_matrices(b, weights + (TILES - 1) * TILE);
                    multiply_add(sums[TILES - 1], x[ahead][i], b[0], b[1]);
                    seen ^= b[0];
                }
            }
            __syncwarp();
            // the slot is free when its loads have returned, not when they have been issued: arrivals overtake them
            if (me.lane == 0) arrive(ring.freed() + (seen & me.never));
            ring.advance();
            if (stage + AHEAD < stages) load_stage(x[ahead], stage + AHEAD);
        }
    }
}

// Adds up the warps' shares, and calls `use(tile, values)` once for each product; GROUP 2: with the values of tile and
// tile + TILES / 2. A tile always comes to the same warp.
template <int GROUP, int TILES, class Use>
__device__ __forceinline__ void add_up(const float (&sums)[TILES][4], float2* scratch, const Thread& me, Use use)
{
    constexpr int ROUND = SCRATCH_BYTES / (WARPS * GROUP * 32 * sizeof(float2)), ITEMS = TILES / GROUP;
    static_assert(ROUND % WARPS == 0, "a tile would change its warp");
    #pragma unroll
    for (int first = 0; first < ITEMS; first += ROUND) {
        consumers_meet();
        #pragma unroll
        for (int i = 0; i < ROUND; i++)
            #pragma unroll
            for (int g = 0; g < GROUP; g++)
                if (first + i < ITEMS) {
                    const float(&from)[4] = sums[first + i + g * ITEMS];
                    scratch[((i * GROUP + g) * WARPS + me.warp) * 32 + me.lane] = make_float2(from[0], from[1]);
                }
        consumers_meet();
        for (int i = me.warp; i < ROUND && first + i < ITEMS; i += WARPS) {
            float2 values[GROUP];
            #pragma unroll
            for (int g = 0; g < GROUP; g++) {
                values[g] = make_float2(0, 0);
                #pragma unroll
                for (int warp = 0; warp < WARPS; warp++) {
                    const float2 share = scratch[((i * GROUP + g) * WARPS + warp) * 32 + me.lane];
                    values[g].x += share.x, values[g].y += share.y;
                }
            }
            use(first + i, values);
        }
    }
}

// What any block wrote before is seen by all after it. The counter only ever grows.
__device__ __forceinline__ void blocks_meet(u64* counter)
{
    if (threadIdx.x == 0) {
        __threadfence();
        const u64 target = (atomicAdd(counter, 1ull) / gridDim.x + 1) * gridDim.x, start = nanoseconds();
        u64 seen;
        do {
            seen = acquired(counter);
            if (seen < target && nanoseconds() - start > PATIENCE_NS) __trap();
        } while (seen < target);
    }
    consumers_meet();
}

// Behind o and down: the residual stream of this block's columns, and what the next matrix multiplies, still unscaled.
__device__ __forceinline__ void add_residual(const float (&sums)[HIDDEN_TILES][4], Shared& shared, float2* scratch,
                                             const float* gain, u32* residual, u32* packed, float* squares,
                                             const Thread& me)
{
    add_up<1>(sums, scratch, me, [&](int tile, const float2 (&values)[1]) {
        const int row = blockIdx.x * HIDDEN_ROWS + tile * 8;
        u32& mine = shared.residual[tile][me.lane];
        const u32 out = rounded(values[0].x, values[0].y);
        mine = rounded(low(mine) + low(out), high(mine) + high(out));
        if (me.is_live) residual[(me.token * HIDDEN + row) / 2 + me.pair] = mine;
        const float* g = gain + tile * 8 + 2 * me.pair;
        const float first = low(mine), second = high(mine);
        pack(packed, row, rounded(first * g[0], second * g[1]), me);
        float square = first * first + second * second;
        square += __shfl_xor_sync(~0u, square, 1);
        square += __shfl_xor_sync(~0u, square, 2);
        if (me.pair == 0) shared.squares[tile][me.token] = square;
    });
    consumers_meet();
    if (me.warp == 0) {
        if (me.lane < TOKENS) {
            float sum = 0;
            for (int tile = 0; tile < HIDDEN_TILES; tile++) sum += shared.squares[tile][me.lane];
            squares[blockIdx.x * TOKENS + me.lane] = sum;
        }
        __syncwarp();
    }
}

// The norm's scale for each token, by one warp each; to be read when the block's warps have met.
__device__ __forceinline__ void find_scale(Shared& shared, const float* squares, float eps, const Thread& me)
{
    static_assert(TOKENS == WARPS, "a warp for each token");
    float sum = 0;
    #pragma unroll
    for (int block = 0; block < HIDDEN_BLOCKS; block += 32)
        if (block + me.lane < HIDDEN_BLOCKS) sum += __ldcg(squares + (block + me.lane) * TOKENS + me.warp);
    #pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (me.lane == 0) shared.scale[me.warp] = rsqrtf(sum / HIDDEN + eps);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) streamed_layer(
    const __grid_constant__ TensorMap o_map, const __grid_constant__ TensorMap gate_up_map,
    const __grid_constant__ TensorMap down_map, const __grid_constant__ TensorMap qkv_map,
    const u32* attended,  // [num_tokens, QUERY]
    const u32* residual,  // [num_tokens, HIDDEN]
    const unsigned short* mlp_norm, const unsigned short* next_norm,
    u32* out,             // [num_tokens, QKV] or [num_tokens, HIDDEN]
    u32* residual_out,    // [num_tokens, HIDDEN]
    u32* packed_hidden, u32* packed_inner,
    float* squares,       // [2, blocks, TOKENS]
    u64* counter, int num_tokens, float eps)
{
    unsigned char* memory = shared_memory();
    float2* scratch = (float2*)(memory + SLOTS * SLOT_BYTES);
    Shared& shared = *(Shared*)(memory + SLOTS * SLOT_BYTES + SCRATCH_BYTES);
    Ring ring{address(memory), address(shared.filled), address(shared.freed)};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            init(address(&shared.filled[slot]), 1);
            init(address(&shared.freed[slot]), WARPS);
        }
        show_barriers_to_copies();
    }
    __syncthreads();
    const int block = blockIdx.x;

    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x > CONSUMERS) return;
        const u64 policy = read_once();  // the cache is better used for what follows
        if (block < HIDDEN_BLOCKS)
            fetch<QUERY, HIDDEN_TILES, O_CHUNKS, false>(ring, o_map, block * HIDDEN_ROWS, policy);
        if (block < INNER_BLOCKS)
            for (int row = block * INNER_ROWS; row < (block + 1) * INNER_ROWS; row += PASS_TILES * 8)
                fetch<HIDDEN, PASS_TILES, GATE_UP_CHUNKS, true>(ring, gate_up_map, row, policy);
        if (block < HIDDEN_BLOCKS)
            fetch<INNER, HIDDEN_TILES, DOWN_CHUNKS, false>(ring, down_map, block * HIDDEN_ROWS, policy);
        if (WITH_QKV && block < QKV_BLOCKS)
            fetch<HIDDEN, QKV_TILES, QKV_CHUNKS, false>(ring, qkv_map, block * QKV_ROWS, policy);
        return;
    }

    Thread me;
    me.warp = threadIdx.x / 32, me.lane = threadIdx.x % 32, me.token = me.lane / 4, me.pair = me.lane % 4;
    me.is_live = me.token < num_tokens, me.never = num_tokens > TOKENS ? ~0u : 0;
    const int matrix = me.lane / 8, line = me.lane % 8;  // of four: columns 0 and 8 of a tile, then of the next tile
    me.offset = matrix / 2 * TILE + line * 128 + ((me.warp % 4 * 2 + matrix % 2) ^ line) * 16;
    float* next_squares = squares + HIDDEN_BLOCKS * TOKENS;

    if (block < HIDDEN_BLOCKS)
        for (int i = threadIdx.x; i < HIDDEN_ROWS; i += CONSUMERS) {
            shared.gain[0][i] = __uint_as_float((u32)mlp_norm[block * HIDDEN_ROWS + i] << 16);
            shared.gain[1][i] = __uint_as_float((u32)next_norm[block * HIDDEN_ROWS + i] << 16);
        }
    wait_for_kernel_in_front();  // only weights may be read before
    if (block < HIDDEN_BLOCKS) {
        for (int tile = me.warp; tile < HIDDEN_TILES; tile += WARPS) {
            const int at = (me.token * HIDDEN + block * HIDDEN_ROWS + tile * 8) / 2 + me.pair;
            shared.residual[tile][me.lane] = me.is_live ? __ldcg(residual + at) : 0;
        }
        float sums[HIDDEN_TILES][4];
        multiply<QUERY, HIDDEN_TILES, O_CHUNKS, false>(sums, ring, attended, me);
        add_residual(sums, shared, scratch, shared.gain[0], residual_out, packed_hidden, squares, me);
    }
    blocks_meet(counter);

    if (block < INNER_BLOCKS) {
        find_scale(shared, squares, eps, me);
        for (int pass = 0; pass < PASSES; pass++) {
            float sums[2 * PASS_TILES][4];
            multiply<HIDDEN, 2 * PASS_TILES, GATE_UP_CHUNKS, true>(sums, ring, packed_hidden, me);
            add_up<2>(sums, scratch, me, [&](int tile, const float2 (&values)[2]) {
                const float scale = shared.scale[me.token];
                // rounded between the steps, as models are in training
                const u32 gate = rounded(values[0].x * scale, values[0].y * scale);
                const u32 up = rounded(values[1].x * scale, values[1].y * scale);
                const u32 open = rounded(low(gate) / (1 + __expf(-low(gate))), high(gate) / (1 + __expf(-high(gate))));
                const u32 inner = rounded(low(open) * low(up), high(open) * high(up));
                pack(packed_inner, block * INNER_ROWS + (pass * PASS_TILES + tile) * 8, inner, me);
            });
        }
        consumers_meet();
    }
    blocks_meet(counter);

    if (block < HIDDEN_BLOCKS) {
        float sums[HIDDEN_TILES][4];
        multiply<INNER, HIDDEN_TILES, DOWN_CHUNKS, true>(sums, ring, packed_inner, me);
        add_residual(sums, shared, scratch, shared.gain[1], residual_out, packed_hidden, next_squares, me);
    }
    blocks_meet(counter);
    let_next_kernel_start();

    if (WITH_QKV && block < QKV_BLOCKS) {
        find_scale(shared, next_squares, eps, me);
        float sums[QKV_TILES][4];
        multiply<HIDDEN, QKV_TILES, QKV_CHUNKS, true>(sums, ring, packed_hidden, me);
        add_up<1>(sums, scratch, me, [&](int tile, const float2 (&values)[1]) {
            const float scale = shared.scale[me.token];
            if (me.is_live)
                out[(me.token * QKV + block * QKV_ROWS + tile * 8) / 2 + me.pair] =
                    rounded(values[0].x * scale, values[0].y * scale);
        });
    }
    if (!WITH_QKV && block < HIDDEN_BLOCKS) {
        find_scale(shared, next_squares, eps, me);
        consumers_meet();
        const float scale = shared.scale[me.token];
        for (int tile = me.warp; tile < HIDDEN_TILES; tile += WARPS) {
            const u32 mine = shared.residual[tile][me.lane];
            const float* g = shared.gain[1] + tile * 8 + 2 * me.pair;
            if (me.is_live)
                out[(me.token * HIDDEN + block * HIDDEN_ROWS + tile * 8) / 2 + me.pair] =
                    rounded(low(mine) * scale * g[0], high(mine) * scale * g[1]);
        }
    }
}
