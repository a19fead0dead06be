// The pass of streamed_pass.cu for 9 to 64 tokens, with the products of wide_linears.cuh, to which the copy engine
// brings tokens. There may be more rows and key/value heads than blocks: then a block attends for several of them.
//
// TOKENS is 16, 32, 48 or 64, and CLUSTER the number of blocks that bring tokens to each other.
#include "layers.cuh"

static_assert(PASSES == 1, "tokens of a second pass would come to where sums of the first are added up");
static_assert(VALUES_BYTES + sizeof(AttentionMemory) <= SCRATCH_BYTES, "both stand where tokens come to otherwise");

struct Shared {
    u64 filled[SLOTS], freed[SLOTS], tokens_filled[TOKEN_SLOTS], tokens_freed[TOKEN_SLOTS];
    float scale[TOKENS];
    float angles[ROW_TOKENS][HEAD_DIM];  // of the row that this block attends for
    float squares[HIDDEN_TILES][TOKENS];
    u32 residual[HIDDEN_TILES][TOKENS * 4];  // this block's columns of the stream
    u32 gain[2][HIDDEN_TILES][32];           // of the norms behind attention and behind the MLP
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "streamed_pass.py sets aside too little");

__device__ __forceinline__ void fetch_all_tokens(TokenRing ring, const Pass& pass, Meeting all_blocks)
{
    if (threadIdx.x % 32) return;
    const int block = blockIdx.x;
    const TensorMap(&maps)[MATRICES] = pass.layers[pass.num_layers].maps;
    for (const TensorMap& map : maps) make_ready(map);
    for (int index = 0; index < pass.num_layers; index++) {
        all_blocks.follow();
        if (block < QKV_BLOCKS) fetch_tokens<HIDDEN, QKV_CHUNKS>(ring, maps[QKV_MATRIX]);
        all_blocks.follow();  // attention begins
        all_blocks.follow();
        if (block < HIDDEN_BLOCKS) fetch_tokens<QUERY, O_CHUNKS>(ring, maps[O_MATRIX]);
        all_blocks.follow();
        if (block < INNER_BLOCKS) fetch_tokens<HIDDEN, GATE_UP_CHUNKS>(ring, maps[GATE_UP_MATRIX]);
        all_blocks.follow();
        if (block < HIDDEN_BLOCKS) fetch_tokens<INNER, DOWN_CHUNKS>(ring, maps[DOWN_MATRIX]);
    }
}

// Calls `use(tile, token)` for all tokens of this block's columns of the residual stream, which a warp takes 8 by 8.
template <class Use> __device__ __forceinline__ void for_residual(const Thread& me, Use use)
{
    for (int tile = me.warp; tile < HIDDEN_TILES; tile += WARPS)
        for (int first = 0; first < TOKENS; first += 8) use(tile, first + me.token);
}

// Where a thread's pair of a token's columns stands in a tile of the residual stream.
__device__ __forceinline__ int cell(int token, const Thread& me) { return token * 4 + me.pair; }

// What the next matrix multiplies, still unscaled, and squares of this block's columns of the residual stream.
__device__ __forceinline__ void hand_on_tile(int tile, int token, Shared& shared, u32 gain, u32* hidden,
                                             const Thread& me)
{
    const u32 mine = shared.residual[tile][cell(token, me)];
    handed_on<HIDDEN>(hidden, blockIdx.x * HIDDEN_ROWS + tile * 8 + 2 * me.pair, token) = multiplied(mine, gain);
    const float square = squares_of(mine);
    if (me.pair == 0) shared.squares[tile][token] = square;
}
__device__ __forceinline__ void hand_on_squares(const Shared& shared, float* squares)
{
    consumers_meet();
    if (threadIdx.x >= TOKENS) return;
    float sum = 0;
    for (int tile = 0; tile < HIDDEN_TILES; tile++) sum += shared.squares[tile][threadIdx.x];
    squares[threadIdx.x * HIDDEN_BLOCKS + blockIdx.x] = sum;
}

// Behind o and down.
__device__ __forceinline__ void add_residual(const float (&sums)[HIDDEN_TILES][4], Shared& shared, float4* scratch,
                                             const u32 (&gain)[HIDDEN_TILES][32], u32* residual, u32* hidden,
                                             float* squares, const Thread& me)
{
    add_up<1>(sums, scratch, me, [&](int tile, int token, const float2 (&values)[1]) {
        u32& mine = shared.residual[tile][cell(token, me)];
        mine = added(mine, values[0]);
        if (residual && token < me.num_tokens)
            residual[(token * HIDDEN + blockIdx.x * HIDDEN_ROWS + tile * 8) / 2 + me.pair] = mine;
        hand_on_tile(tile, token, shared, gain[tile][me.lane], hidden, me);
    });
    hand_on_squares(shared, squares);
}

// A norm's scale for each token, by one warp each, to be read when the block's warps have met. In front of a product,
// whose sums will need the registers and whose first tokens are on their way.
__device__ __forceinline__ void find_scales(Shared& shared, const float* squares, float eps, const Thread& me)
{
    constexpr int TURNS = TOKENS / WARPS, PARTS = (HIDDEN_BLOCKS + 31) / 32;
    float parts[TURNS][PARTS];
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
        #pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const int token = turn * WARPS + me.warp, block = i * 32 + me.lane;
            parts[turn][i] = block < HIDDEN_BLOCKS ? load_float(squares + token * HIDDEN_BLOCKS + block) : 0;
        }
    #pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        float sum = 0;
        #pragma unroll
        for (int i = 0; i < PARTS; i++) sum += parts[turn][i];
        #pragma unroll
        for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (me.lane == 0) shared.scale[turn * WARPS + me.warp] = rsqrtf(sum / HIDDEN + eps);
    }
}

// Warps: the first asks for weights, the second for tokens. Registers change hands between groups of four.
constexpr int FETCHERS = 4;

extern "C" __global__ void __launch_bounds__(CONSUMERS + FETCHERS * 32, 1)
wide_pass(const __grid_constant__ Pass pass)
{
    unsigned char *memory = shared_memory(), *slots = memory + SCRATCH_BYTES;
    float4* scratch = (float4*)memory;  // tokens, and at other times sums, or what attention needs
    uint4* values = (uint4*)memory;
    AttentionMemory& attention = *(AttentionMemory*)(memory + VALUES_BYTES);
    Shared& shared = *(Shared*)(slots + SLOTS * SLOT_BYTES);
    Rings rings{{address(slots), address(shared.filled), address(shared.freed)},
                {address(memory), address(shared.tokens_filled), address(shared.tokens_freed)}};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            init(address(&shared.filled[slot]), 1);
            init(address(&shared.freed[slot]), WARPS);
        }
        for (int slot = 0; slot < TOKEN_SLOTS; slot++) {
            init(address(&shared.tokens_filled[slot]), 1);
            init(address(&shared.tokens_freed[slot]), WARPS * CLUSTER);
        }
        show_barriers_to_copies();
    }
    const Meeting followed(pass.counter, gridDim.x);  // before this block can have arrived
    cluster_meets();
    if (threadIdx.x >= CONSUMERS) {
        keep_registers<40>();
        if (threadIdx.x / 32 == WARPS) fetch_all(rings.weights, pass);
        if (threadIdx.x / 32 == WARPS + 1) fetch_all_tokens(rings.tokens, pass, followed);
        return;
    }
    take_registers<232>();

    const Thread me = this_thread(pass.num_tokens);
    const int block = blockIdx.x;
    const bool has_hidden = block < HIDDEN_BLOCKS;
    float* const squares[2] = {pass.squares, pass.squares + HIDDEN_BLOCKS * TOKENS};
    const int num_splits = pass.batch.num_splits, items_at_once = gridDim.x / num_splits;
    const Share share = share_of(pass.batch, blockIdx.x / num_splits);
    const bool has_more = share.item + items_at_once < pass.batch.num_rows * KV_HEADS;
    if (share.is_any) take_angles(shared.angles, share.start, share.num_tokens, pass.batch);
    Meeting all_blocks(pass.counter, gridDim.x);
    Meeting splits(pass.partials.counters + share.item, MAX_SPLITS);  // of a row; those that it has count for all
    Tensors layer = pass.layers[0].tensors;
    if (has_hidden) {
        for_residual(me, [&](int tile, int token) {
            const int at = (token * HIDDEN + block * HIDDEN_ROWS + tile * 8) / 2 + me.pair;
            shared.residual[tile][cell(token, me)] = token < me.num_tokens ? pass.embedded[at] : 0;
            hand_on_tile(tile, token, shared, *weights_of(layer.attention_norm, tile, me), pass.hidden, me);
        });
        hand_on_squares(shared, squares[1]);
    }

    for (int index = 0; index < pass.num_layers; index++) {
        const Tensors next = pass.layers[index + 1].tensors;
        all_blocks.meet();

        if (block < QKV_BLOCKS) {
            find_scales(shared, squares[1], pass.eps, me);
            float sums[QKV_TILES][4];
            multiply<HIDDEN, QKV_TILES, QKV_CHUNKS>(sums, rings, me);
            add_up<1>(sums, scratch, me, [&](int tile, int token, const float2 (&values)[1]) {
                const float scale = shared.scale[token];
                if (token < me.num_tokens)
                    pass.qkv[(token * QKV + block * QKV_ROWS + tile * 8) / 2 + me.pair] =
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

        Share item = share;
        for (int next = share.item + items_at_once; item.is_any; next += items_at_once) {
            take_in(attention, values, (const uint4*)pass.qkv, item, shared.angles, pass.batch, layer.keys,
                    layer.values);
            consumers_meet();
            attend(attention, keys, values, item, pass.batch, pass.partials, layer.keys, layer.values, me);
            if (has_more) {  // so there are no splits
                consumers_meet();
            } else {
                splits.arrive(item.split == num_splits - 1 ? MAX_SPLITS - item.split : 1);
                splits.wait();
            }
            combine(pass.attended, item, num_splits, pass.partials);
            if (!has_more) break;
            item = share_of(pass.batch, next);
            item.item = share.item;  // partial results take the place of those before
            const bool is_any = item.is_any;  // else the next layer begins anew
            take_angles(shared.angles, is_any ? item.start : share.start, is_any ? item.num_tokens : share.num_tokens,
                        pass.batch);
            if (item.is_any) ask_for_tile(keys, values, item, item.begin, layer.keys, layer.values, me);
            consumers_meet();
        }
        all_blocks.meet();

        if (has_hidden) {
            float sums[HIDDEN_TILES][4];
            multiply<QUERY, HIDDEN_TILES, O_CHUNKS>(sums, rings, me);
            await_copies();  // of gains
            add_residual(sums, shared, scratch, shared.gain[0], nullptr, pass.hidden, squares[0], me);
        }
        all_blocks.meet();

        if (block < INNER_BLOCKS) {
            find_scales(shared, squares[0], pass.eps, me);
            float sums[2 * INNER_TILES][4];
            multiply<HIDDEN, 2 * INNER_TILES, GATE_UP_CHUNKS>(sums, rings, me);
            add_up<2>(sums, scratch, me, [&](int tile, int token, const float2 (&values)[2]) {
                handed_on<INNER>(pass.inner, block * INNER_ROWS + tile * 8 + 2 * me.pair, token) =
                    gated(values, shared.scale[token]);
            });
        }
        all_blocks.meet();

        if (has_hidden) {
            float sums[HIDDEN_TILES][4];
            multiply<INNER, HIDDEN_TILES, DOWN_CHUNKS>(sums, rings, me);
            u32* residual = pass.residuals + (long long)index * pass.num_tokens * (HIDDEN / 2);
            add_residual(sums, shared, scratch, shared.gain[1], residual, pass.hidden, squares[1], me);
        }
        layer = next;
    }
    all_blocks.meet();  // no block of a cluster ends while another still frees its slots
    if (!has_hidden) return;
    find_scales(shared, squares[1], pass.eps, me);
    consumers_meet();
    for_residual(me, [&](int tile, int token) {
        const u32 mine = shared.residual[tile][cell(token, me)], gain = *weights_of(layer.attention_norm, tile, me);
        const float scale = shared.scale[token];
        if (token < me.num_tokens)
            pass.out[(token * HIDDEN + block * HIDDEN_ROWS + tile * 8) / 2 + me.pair] =
                rounded(low(mine) * scale * low(gain), high(mine) * scale * high(gain));
    });
}
