// A pass of at most 8 tokens through all layers of a decoder, in one kernel that never stops reading weights: for each
// layer norm, q, k and v, attention, output projection, norm, gated MLP. Its twin is a decoder's own pass.
//
// Blocks hand on what they have to all others and go on; weights go on filling the ring while they look for what they
// need next (linears.cuh). A norm's scale multiplies the sums behind it, since its squares are known only when all
// blocks have given theirs. Keys and values of the cache are asked for before q, k and v are there.
//
// While weights come, whatever else must come from memory takes as long as all that has been asked for before it: 5 us.
// So a layer's addresses are asked for two layers ahead, scales of rows one, and its norms' weights before attention.
#include "layers.cuh"

constexpr int PASS_TILES = INNER_TILES / PASSES;  // of gates in a pass, and as many of what they multiply
// Where scales of rows stand, matrix by matrix, in the end those of gates and of what they multiply, pass by pass.
constexpr int O_SCALES = QKV_ROWS, DOWN_SCALES = O_SCALES + HIDDEN_ROWS, GATE_UP_SCALES = DOWN_SCALES + HIDDEN_ROWS;

struct Shared {
    u64 filled[SLOTS], freed[SLOTS];
    float scale[TOKENS];
    Share shares[WARPS];
    AttentionMemory attention;
    float angles[ROW_TOKENS][HEAD_DIM];  // of the row that this block attends for
    float squares[HIDDEN_TILES][TOKENS];
    u32 residual[HIDDEN_TILES][32];  // this block's columns of the stream
    u32 gain[2][HIDDEN_TILES][32];   // of the norms behind the MLP, where the next layer begins, and its attention
    Tensors tensors[4];              // of a layer, and of the next ones
    float row_scales[PLANES == 1 ? 1 : GATE_UP_SCALES + 2 * INNER_ROWS];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "streamed_plan.py sets aside too little");

// Layers take turns with four sets of what is handed on. A block wipes the set of the layer before when it has handed
// on its q, k and v: all it multiplied for them is there, so all of the layer before has been read. What it hands on as
// q, k and v of the next layer comes behind that, and whoever looks at the wiped set again has seen what followed from
// these.
constexpr int SETS = 4;
struct Handed {  // on in a layer
    u32 *hidden[2], *squares[2];  // in front of attention and of the MLP
    u32 *qkv, *attended, *inner;
    Partials partials;
};
__device__ __forceinline__ Handed set_of(const Pass& pass, int index)
{
    const int offset = index % SETS * pass.set_words;
    u32* const squares = pass.squares + offset;
    return {{pass.hidden + offset, pass.hidden + offset + TOKENS * HIDDEN / 2},
            {squares, squares + HIDDEN_BLOCKS * TOKENS},
            pass.qkv + offset, pass.attended + offset, pass.inner + offset,
            {pass.partials.results + offset, pass.partials.sums + offset}};
}
__device__ __forceinline__ void wipe(const Handed& set, int block, int num_blocks)  // its partial results stand last
{
    const u32* const end = set.partials.results + gridDim.x * QUERIES * HEAD_DIM;
    #pragma unroll 1
    for (u32* at = set.hidden[0] + (block * CONSUMERS + threadIdx.x) * 4; at < end; at += num_blocks * CONSUMERS * 4)
        *(uint4*)at = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
}

// All blocks, once in a launch. What they wrote before is seen by all behind. The counter only grows: where it stood in
// front of the launch, which no block has passed without this one, is the last multiple of their number.
__device__ __forceinline__ void blocks_meet(u64* counter)
{
    consumers_meet();
    if (threadIdx.x == 0) {
        const u64 target = (acquired(counter) / gridDim.x + 1) * gridDim.x;
        add_released(counter, 1);
        look_until([&] { return acquired(counter) >= target; });
    }
    consumers_meet();
}

// What the next matrix multiplies, still unscaled, and squares of this block's columns of the residual stream.
__device__ __forceinline__ void hand_on_tile(int tile, Shared& shared, u32 gain, u32* hidden, const Thread& me)
{
    const u32 mine = shared.residual[tile][me.lane];
    if (me.is_live)
        store(&handed_on<HIDDEN>(hidden, blockIdx.x * HIDDEN_ROWS + tile * 8 + 2 * me.pair, me.token),
              multiplied(mine, gain));
    const float square = squares_of(mine);
    if (me.pair == 0) shared.squares[tile][me.token] = square;
}
__device__ __forceinline__ void hand_on_squares(const Shared& shared, u32* squares, const Thread& me)
{
    consumers_meet();
    if (threadIdx.x >= me.num_tokens) return;
    float sum = 0;
    for (int tile = 0; tile < HIDDEN_TILES; tile++) sum += shared.squares[tile][threadIdx.x];
    store(squares + blockIdx.x * TOKENS + threadIdx.x, __float_as_uint(sum));
}

// Behind o and down.
__device__ __forceinline__ void add_residual(const Sums<HIDDEN_TILES>& sums,
                                             const RowScales<1, HIDDEN_TILES>& rows, Shared& shared, float2* scratch,
                                             const u32 (&gain)[HIDDEN_TILES][32], u32* residual, u32* hidden,
                                             u32* squares, const Thread& me)
{
    add_up<1>(sums, rows, scratch, me, [&](int tile, const float2 (&values)[1]) {
        u32& mine = shared.residual[tile][me.lane];
        mine = added(mine, values[0]);
        hand_on_tile(tile, shared, gain[tile][me.lane], hidden, me);
        if (residual && me.is_live)
            residual[(me.token * HIDDEN + blockIdx.x * HIDDEN_ROWS + tile * 8) / 2 + me.pair] = mine;
    });
    hand_on_squares(shared, squares, me);
}

// A norm's scale for each token, by one warp each: asked for before a product, found behind it.
struct Squares {
    static constexpr int PARTS = (HIDDEN_BLOCKS + 31) / 32;
    const u32* from;
    u32 parts[PARTS];
    __device__ Squares(const u32* squares, const Thread& me) : from(squares + me.lane * TOKENS + me.warp)
    {
        static_assert(TOKENS == WARPS, "a warp for each token");
        #pragma unroll
        for (int i = 0; i < PARTS; i++)
            parts[i] = i * 32 + me.lane < HIDDEN_BLOCKS && me.warp < me.num_tokens ? EMPTY : 0;
    }
    __device__ void look(const Thread& me)
    {
        #pragma unroll
        for (int i = 0; i < PARTS; i++)
            if (parts[i] == EMPTY) load(parts[i], from + i * 32 * TOKENS);
    }
    // To be read when the block's warps have met, which have to meet before, too, if they have read the last one.
    __device__ void find_scale(Shared& shared, float eps, const Thread& me)
    {
        if (!are_there(parts)) look_until([&] { return look(me), are_there(parts); });
        __syncwarp();
        float sum = 0;
        #pragma unroll
        for (int i = 0; i < PARTS; i++) sum += __uint_as_float(parts[i]);
        #pragma unroll
        for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (me.lane == 0) shared.scale[me.warp] = rsqrtf(sum * (1.0f / HIDDEN) + eps);
    }
};

__device__ __forceinline__ void ask_for_gains(Shared& shared, const Tensors& next, const Thread& me)
{
    for (int tile = me.warp; tile < HIDDEN_TILES; tile += WARPS) {
        copy_later(&shared.gain[0][tile][me.lane], weights_of(next.attention_norm, tile, me));
        if (next.mlp_norm) copy_later(&shared.gain[1][tile][me.lane], weights_of(next.mlp_norm, tile, me));
    }
}
__device__ __forceinline__ void ask_for_tensors(Shared& shared, const Pass& pass, int index)
{
    constexpr int WORDS = sizeof(Tensors) / sizeof(u32);
    if (index <= pass.num_layers && threadIdx.x < WORDS)
        copy_later((u32*)&shared.tensors[index % 4] + threadIdx.x,
                   (const u32*)&pass.layers[index].tensors + threadIdx.x);
}

__device__ __forceinline__ void fetch_weights(Ring ring, const Pass& pass)
{
    const int block = blockIdx.x;
    const u64 policy = read_once();  // the cache is better used for what is read again
    fetch_all(pass, [&](const TensorMap(&maps)[MATRICES][KINDS]) {
        if (block < QKV_BLOCKS) fetch<HIDDEN, QKV_TILES, QKV_CHUNKS>(ring, maps[QKV_MATRIX], block * QKV_ROWS, policy);
        if (block < HIDDEN_BLOCKS)
            fetch<QUERY, HIDDEN_TILES, O_CHUNKS>(ring, maps[O_MATRIX], block * HIDDEN_ROWS, policy);
        if (block < INNER_BLOCKS)
            for (int row = block * INNER_ROWS; row < (block + 1) * INNER_ROWS; row += PASS_TILES * 8)
                fetch<HIDDEN, 2 * PASS_TILES, GATE_UP_CHUNKS>(ring, maps[GATE_UP_MATRIX], row, policy);
        if (block < HIDDEN_BLOCKS)
            fetch<INNER, HIDDEN_TILES, DOWN_CHUNKS>(ring, maps[DOWN_MATRIX], block * HIDDEN_ROWS, policy);
    });
}

// One fetches. The others of its group give registers to the two groups that multiply: with fewer the compiler has
// products that are added to each other follow each other.
constexpr int FETCHERS = 4;

extern "C" __global__ void __launch_bounds__(CONSUMERS + FETCHERS * 32, 1)
streamed_pass(const __grid_constant__ Pass pass)
{
    unsigned char* memory = shared_memory();
    float2* scratch = (float2*)(memory + SLOTS * SLOT_BYTES);
    uint4* values = (uint4*)scratch;  // at other times
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
    if (threadIdx.x >= CONSUMERS) {
        keep_registers<40>();
        if (threadIdx.x < CONSUMERS + 32) fetch_weights(ring, pass);
        return;
    }
    take_registers<232>();

    const Thread me = this_thread(pass.num_tokens);
    const int block = blockIdx.x;
    const bool has_hidden = block < HIDDEN_BLOCKS;
    Share& share = shared.shares[me.warp];  // registers have no room for it
    const Share found = share_of(pass.batch, blockIdx.x / pass.batch.num_splits);
    if (me.lane == 0) share = found;
    __syncwarp();
    if (share.is_any) take_angles(shared.angles, share.start, share.num_tokens, pass.batch);
    ask_for_tensors(shared, pass, 0);
    ask_for_tensors(shared, pass, 1);
    for (int set = 0; set < SETS; set++) wipe(set_of(pass, set), block, gridDim.x);
    await_copies();
    blocks_meet(pass.counter);
    if (has_hidden) {
        const Handed first = set_of(pass, 0);
        ask_for_gains(shared, shared.tensors[0], me);
        for (int tile = me.warp; tile < HIDDEN_TILES; tile += WARPS) {
            const int at = (me.token * HIDDEN + block * HIDDEN_ROWS + tile * 8) / 2 + me.pair;
            shared.residual[tile][me.lane] = me.is_live ? pass.embedded[at] : 0;
            hand_on_tile(tile, shared, *weights_of(shared.tensors[0].attention_norm, tile, me), first.hidden[0], me);
        }
        hand_on_squares(shared, first.squares[0], me);
    }

    const RowScales<1, QKV_TILES> qkv_scales{shared.row_scales, block * QKV_ROWS, 0};
    const RowScales<1, HIDDEN_TILES> o_scales{shared.row_scales + O_SCALES, block * HIDDEN_ROWS, 0};
    const RowScales<1, HIDDEN_TILES> down_scales{shared.row_scales + DOWN_SCALES, block * HIDDEN_ROWS, 0};
    const auto gate_up_scales = [&](int part) {
        float* kept = shared.row_scales + GATE_UP_SCALES + part * 2 * PASS_TILES * 8;
        return RowScales<2, 2 * PASS_TILES>{kept, block * INNER_ROWS + part * PASS_TILES * 8, INNER};
    };
    if (PLANES > 1) {
        const auto& scales = shared.tensors[0].row_scales;
        if (block < QKV_BLOCKS) qkv_scales.ask(scales[QKV_MATRIX], me.warp, me.lane);
        if (has_hidden) o_scales.ask(scales[O_MATRIX], me.warp, me.lane);
        if (has_hidden) down_scales.ask(scales[DOWN_MATRIX], me.warp, me.lane);
        for (int part = 0; part < PASSES && block < INNER_BLOCKS; part++)
            gate_up_scales(part).ask(scales[GATE_UP_MATRIX], me.warp, me.lane);
        await_copies();
    }

    for (int index = 0; index < pass.num_layers; index++) {
        const Tensors &layer = shared.tensors[index % 4], &next = shared.tensors[(index + 1) % 4];
        const Handed handed = set_of(pass, index);
        const Thread me = this_thread(pass.num_tokens);
        if (block < QKV_BLOCKS) {
            Squares of_tokens(handed.squares[0], me);
            Sums<QKV_TILES> sums;
            multiply<HIDDEN, QKV_TILES, QKV_CHUNKS>(sums, ring, handed.hidden[0], me, [&] { of_tokens.look(me); });
            of_tokens.find_scale(shared, pass.eps, me);
            if (PLANES > 1 && !has_hidden) await_copies();  // of scales, which others await with those behind down
            add_up<1>(sums, qkv_scales, scratch, me, [&](int tile, const float2 (&values)[1]) {
                const float scale = shared.scale[me.token];
                if (me.is_live)
                    store(handed.qkv + (me.token * QKV + block * QKV_ROWS + tile * 8) / 2 + me.pair,
                          rounded(values[0].x * scale, values[0].y * scale));
            });
        }
        consumers_meet();  // scratch becomes room for values
        Keys keys;
        if (share.is_any) ask_for_tile(keys, values, share, share.begin, layer.keys, layer.values, me);
        if (share.is_any) {
            take_in(shared.attention, values, (const uint4*)handed.qkv, share, shared.angles, pass.batch, layer.keys,
                    layer.values);
            consumers_meet();
            attend(shared.attention, keys, values, share, pass.batch, handed.partials, layer.keys, layer.values, me);
            combine(handed.attended, share, pass.batch.num_splits, handed.partials);
            attend_to_nothing(handed.attended, share, pass.batch, pass.num_tokens);
        }
        await_copies();
        consumers_meet();
        if (threadIdx.x == CONSUMERS - 1) __threadfence();  // what was wiped is so for all, before more is handed on
        if (block < QKV_BLOCKS) qkv_scales.ask(next.row_scales[QKV_MATRIX], me.warp, me.lane);

        if (has_hidden) {
            Sums<HIDDEN_TILES> sums;
            multiply<QUERY, HIDDEN_TILES, O_CHUNKS>(sums, ring, handed.attended, me, [] {});
            add_residual(sums, o_scales, shared, scratch, shared.gain[1], nullptr, handed.hidden[1], handed.squares[1],
                         me);
            o_scales.ask(next.row_scales[O_MATRIX], me.warp, me.lane);
        }

        if (has_hidden) ask_for_gains(shared, next, me);
        ask_for_tensors(shared, pass, index + 2);
        if (block < INNER_BLOCKS) {
            if (index) wipe(set_of(pass, index - 1), block, INNER_BLOCKS);
            Squares of_tokens(handed.squares[1], me);
            for (int part = 0; part < PASSES; part++) {
                const RowScales<2, 2 * PASS_TILES> scales = gate_up_scales(part);
                Sums<2 * PASS_TILES> sums;
                multiply<HIDDEN, 2 * PASS_TILES, GATE_UP_CHUNKS>(sums, ring, handed.hidden[1], me, [&] {
                    if (part == 0) of_tokens.look(me);
                });
                if (part == 0) of_tokens.find_scale(shared, pass.eps, me);
                add_up<2>(sums, scales, scratch, me, [&](int tile, const float2 (&values)[2]) {
                    const int column = scales.row + tile * 8 + 2 * me.pair;
                    if (me.is_live)
                        store(&handed_on<INNER>(handed.inner, column, me.token), gated(values, shared.scale[me.token]));
                });
                scales.ask(next.row_scales[GATE_UP_MATRIX], me.warp, me.lane);
            }
        }

        if (has_hidden) {
            Sums<HIDDEN_TILES> sums;
            multiply<INNER, HIDDEN_TILES, DOWN_CHUNKS>(sums, ring, handed.inner, me, [] {});
            await_copies();  // of gains
            const Handed to = set_of(pass, index + 1);
            u32* residual = pass.residuals + (long long)index * pass.num_tokens * (HIDDEN / 2);
            add_residual(sums, down_scales, shared, scratch, shared.gain[0], residual, to.hidden[0], to.squares[0], me);
            down_scales.ask(next.row_scales[DOWN_MATRIX], me.warp, me.lane);
        } else {
            consumers_meet();  // as the others have: a norm's scale becomes the next one's
        }
    }
    if (!has_hidden) return;
    Squares(set_of(pass, pass.num_layers).squares[0], me).find_scale(shared, pass.eps, me);
    consumers_meet();
    const float scale = shared.scale[me.token];
    const u32* norm = shared.tensors[pass.num_layers % 4].attention_norm;
    for (int tile = me.warp; tile < HIDDEN_TILES; tile += WARPS) {
        const u32 mine = shared.residual[tile][me.lane], gain = *weights_of(norm, tile, me);
        if (me.is_live)
            pass.out[(me.token * HIDDEN + block * HIDDEN_ROWS + tile * 8) / 2 + me.pair] =
                rounded(low(mine) * scale * low(gain), high(mine) * scale * high(gain));
    }
}
