// A pass of at most 8 tokens through all layers of a decoder, in one kernel that never stops reading weights: for each
// layer norm, q, k and v, attention, output projection, norm, gated MLP. Its twin is a decoder's own pass.
//
// Blocks meet at a counter between matrices, while weights go on filling the ring (linears.cuh). A norm's scale
// multiplies the sums behind it, since its squares are known only when all blocks have met. Keys and values of the
// cache are asked for before the meeting behind q, k and v, since they do not depend on it.
#include "layers.cuh"

struct Shared {
    u64 filled[SLOTS], freed[SLOTS];
    float scale[TOKENS];
    AttentionMemory attention;
    float angles[ROW_TOKENS][HEAD_DIM];  // of the row that this block attends for
    float squares[HIDDEN_TILES][TOKENS];
    u32 residual[HIDDEN_TILES][32];  // this block's columns of the stream
    u32 gain[2][HIDDEN_TILES][32];   // of the norms behind attention and behind the MLP
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "streamed_pass.py sets aside too little");

// What the next matrix multiplies, still unscaled, and squares of this block's columns of the residual stream.
__device__ __forceinline__ void hand_on_tile(int tile, Shared& shared, u32 gain, u32* hidden, const Thread& me)
{
    const u32 mine = shared.residual[tile][me.lane];
    handed_on<HIDDEN>(hidden, blockIdx.x * HIDDEN_ROWS + tile * 8 + 2 * me.pair, me.token) = multiplied(mine, gain);
    const float square = squares_of(mine);
    if (me.pair == 0) shared.squares[tile][me.token] = square;
}
__device__ __forceinline__ void hand_on_squares(const Shared& shared, float* squares)
{
    consumers_meet();
    if (threadIdx.x >= TOKENS) return;
    float sum = 0;
    for (int tile = 0; tile < HIDDEN_TILES; tile++) sum += shared.squares[tile][threadIdx.x];
    squares[blockIdx.x * TOKENS + threadIdx.x] = sum;
}

// Behind o and down.
__device__ __forceinline__ void add_residual(const float (&sums)[HIDDEN_TILES][4], Shared& shared, float2* scratch,
                                             const u32 (&gain)[HIDDEN_TILES][32], u32* residual, u32* hidden,
                                             float* squares, const Thread& me)
{
    add_up<1>(sums, scratch, me, [&](int tile, const float2 (&values)[1]) {
        u32& mine = shared.residual[tile][me.lane];
        mine = added(mine, values[0]);
        if (residual && me.is_live)
            residual[(me.token * HIDDEN + blockIdx.x * HIDDEN_ROWS + tile * 8) / 2 + me.pair] = mine;
        hand_on_tile(tile, shared, gain[tile][me.lane], hidden, me);
    });
    hand_on_squares(shared, squares);
}

// A norm's scale for each token, by one warp each: asked for before a product, found behind it.
struct Squares {
    float parts[(HIDDEN_BLOCKS + 31) / 32];
    __device__ Squares(const float* squares, const Thread& me)
    {
        static_assert(TOKENS == WARPS, "a warp for each token");
        #pragma unroll
        for (int i = 0; i < (HIDDEN_BLOCKS + 31) / 32; i++) {
            const int block = i * 32 + me.lane;
            parts[i] = block < HIDDEN_BLOCKS ? load_float(squares + block * TOKENS + me.warp) : 0;
        }
    }
    // to be read when the block's warps have met
    __device__ void find_scale(Shared& shared, float eps, const Thread& me) const
    {
        float sum = 0;
        #pragma unroll
        for (int i = 0; i < (HIDDEN_BLOCKS + 31) / 32; i++) sum += parts[i];
        #pragma unroll
        for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (me.lane == 0) shared.scale[me.warp] = rsqrtf(sum / HIDDEN + eps);
    }
};

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) streamed_pass(const __grid_constant__ Pass pass)
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
        fetch_all(ring, pass);
        return;
    }

    const Thread me = this_thread(pass.num_tokens);
    const int block = blockIdx.x;
    const bool has_hidden = block < HIDDEN_BLOCKS;
    float* const squares[2] = {pass.squares, pass.squares + HIDDEN_BLOCKS * TOKENS};
    const Share share = share_of(pass.batch, blockIdx.x / pass.batch.num_splits);
    if (share.is_any) take_angles(shared.angles, share.start, share.num_tokens, pass.batch);
    Meeting all_blocks(pass.counter, gridDim.x);
    Meeting splits(pass.partials.counters + share.item, MAX_SPLITS);  // of a row; those that it has count for all
    Tensors layer = pass.layers[0].tensors;
    if (has_hidden) {
        for (int tile = me.warp; tile < HIDDEN_TILES; tile += WARPS) {
            const int at = (me.token * HIDDEN + block * HIDDEN_ROWS + tile * 8) / 2 + me.pair;
            shared.residual[tile][me.lane] = me.is_live ? pass.embedded[at] : 0;
            hand_on_tile(tile, shared, *weights_of(layer.attention_norm, tile, me), pass.hidden, me);
        }
        hand_on_squares(shared, squares[1]);
    }

    for (int index = 0; index < pass.num_layers; index++) {
        const Tensors next = pass.layers[index + 1].tensors;
        all_blocks.meet();

        if (block < QKV_BLOCKS) {
            const Squares of_tokens(squares[1], me);
            float sums[QKV_TILES][4];
            multiply<HIDDEN, QKV_TILES, QKV_CHUNKS>(sums, ring, pass.hidden, me);
            of_tokens.find_scale(shared, pass.eps, me);
            add_up<1>(sums, scratch, me, [&](int tile, const float2 (&values)[1]) {
                const float scale = shared.scale[me.token];
                if (me.is_live)
                    pass.qkv[(me.token * QKV + block * QKV_ROWS + tile * 8) / 2 + me.pair] =
                        rounded(values[0].x * scale, values[0].y * scale);
            });
        }
        all_blocks.arrive();
        if (has_hidden)
            for (int tile = me.warp; tile < HIDDEN_TILES; tile += WARPS) {
                copy_later(&shared.gain[0][tile][me.lane], weights_of(layer.mlp_norm, tile, me));
                copy_later(&shared.gain[1][tile][me.lane], weights_of(next.attention_norm, tile, me));
            }
        Keys keys;
        if (share.is_any) ask_for_tile(keys, values, share, share.begin, layer.keys, layer.values, me);
        all_blocks.wait();

        if (share.is_any) {
            take_in(shared.attention, values, (const uint4*)pass.qkv, share, shared.angles, pass.batch, layer.keys,
                    layer.values);
            consumers_meet();
            attend(shared.attention, keys, values, share, pass.batch, pass.partials, layer.keys, layer.values, me);
            const int num_splits = pass.batch.num_splits;
            splits.arrive(share.split == num_splits - 1 ? MAX_SPLITS - share.split : 1);
            splits.wait();
            combine(pass.attended, share, num_splits, pass.partials);
        }
        all_blocks.meet();

        if (has_hidden) {
            float sums[HIDDEN_TILES][4];
            multiply<QUERY, HIDDEN_TILES, O_CHUNKS>(sums, ring, pass.attended, me);
            await_copies();  // of gains
            add_residual(sums, shared, scratch, shared.gain[0], nullptr, pass.hidden, squares[0], me);
        }
        all_blocks.meet();

        if (block < INNER_BLOCKS) {
            const Squares of_tokens(squares[0], me);
            for (int part = 0; part < PASSES; part++) {
                float sums[2 * PASS_TILES][4];
                multiply<HIDDEN, 2 * PASS_TILES, GATE_UP_CHUNKS>(sums, ring, pass.hidden, me);
                if (part == 0) of_tokens.find_scale(shared, pass.eps, me);
                add_up<2>(sums, scratch, me, [&](int tile, const float2 (&values)[2]) {
                    const int column = block * INNER_ROWS + (part * PASS_TILES + tile) * 8 + 2 * me.pair;
                    handed_on<INNER>(pass.inner, column, me.token) = gated(values, shared.scale[me.token]);
                });
            }
        }
        all_blocks.meet();

        if (has_hidden) {
            float sums[HIDDEN_TILES][4];
            multiply<INNER, HIDDEN_TILES, DOWN_CHUNKS>(sums, ring, pass.inner, me);
            u32* residual = pass.residuals + (long long)index * pass.num_tokens * (HIDDEN / 2);
            add_residual(sums, shared, scratch, shared.gain[1], residual, pass.hidden, squares[1], me);
        }
        layer = next;
    }
    all_blocks.meet();
    if (!has_hidden) return;
    Squares(squares[1], me).find_scale(shared, pass.eps, me);
    consumers_meet();
    const float scale = shared.scale[me.token];
    for (int tile = me.warp; tile < HIDDEN_TILES; tile += WARPS) {
        const u32 mine = shared.residual[tile][me.lane], gain = *weights_of(layer.attention_norm, tile, me);
        if (me.is_live)
            pass.out[(me.token * HIDDEN + block * HIDDEN_ROWS + tile * 8) / 2 + me.pair] =
                rounded(low(mine) * scale * low(gain), high(mine) * scale * high(gain));
    }
}
