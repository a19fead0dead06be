// The pass of streamed_pass.cu for 9 to 64 tokens, with the products of wide_linears.cuh and the attention of
// wide_attention.cuh. Blocks meet between matrices. There may be more rows and key/value heads than blocks: then a
// block attends for several of them.
//
// TOKENS is 16, 32, 48 or 64.
#include "layers.cuh"
#include "wide_attention.cuh"

static_assert(INNER_TILES % 2 == 0, "groups of warps have a half each");

struct Shared {
    u64 filled[SLOTS], freed[SLOTS], tokens_filled[TOKEN_SLOTS], tokens_freed[TOKEN_SLOTS], received;
    float scale[TOKENS];
    float angles[ROW_TOKENS][HEAD_DIM];  // of the row that this block attends for
    float squares[HIDDEN_TILES][TOKENS];
    u32 residual[HIDDEN_TILES][TOKENS * 4];  // this block's columns of the stream
    u32 gain[2][HIDDEN_TILES][32];           // of the norms behind attention and behind the MLP
    union {
        float4 sums[HIDDEN_TILES > QKV_TILES ? HIDDEN_TILES : QKV_TILES][128];  // which the pair's other block sends
        QueryMemory queries;                                                   // at other times
    };
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "streamed_pass.py sets aside too little");

__device__ __forceinline__ void fetch_all_weights(Ring ring, const Pass& pass)
{
    const int block = blockIdx.x, half = block % 2;
    const int qkv_row = (block - half) * QKV_ROWS, row = (block - half) * HIDDEN_ROWS, gate = block * INNER_ROWS;
    const u64 policy = read_once();  // the cache is better used for what is read again
    fetch_all(pass, [&](const TensorMap(&maps)[MATRICES]) {
        if (block < QKV_BLOCKS)
            fetch_weights<HIDDEN / 2, QKV_TILES, QKV_CHUNKS>(ring, maps[QKV_MATRIX], half * (HIDDEN / 2), qkv_row,
                                                             qkv_row + QKV_ROWS, policy);
        if (block < HIDDEN_BLOCKS)
            fetch_weights<QUERY / 2, HIDDEN_TILES, O_CHUNKS>(ring, maps[O_MATRIX], half * (QUERY / 2), row,
                                                             row + HIDDEN_ROWS, policy);
        if (block < INNER_BLOCKS)
            fetch_weights<HIDDEN, INNER_TILES, GATE_UP_CHUNKS>(ring, maps[GATE_UP_MATRIX], 0, gate,
                                                               gate + INNER_ROWS / 2, policy);
        if (block < HIDDEN_BLOCKS)
            fetch_weights<INNER / 2, HIDDEN_TILES, DOWN_CHUNKS>(ring, maps[DOWN_MATRIX], half * (INNER / 2), row,
                                                                row + HIDDEN_ROWS, policy);
    });
}

__device__ __forceinline__ void fetch_all_tokens(TokenRing ring, const Pass& pass, Meeting all_blocks)
{
    if (threadIdx.x % 32) return;
    const int block = blockIdx.x, half = block % 2;
    const TensorMap(&maps)[MATRICES] = pass.layers[pass.num_layers].maps;
    for (const TensorMap& map : maps) make_ready(map);
    for (int index = 0; index < pass.num_layers; index++) {
        all_blocks.follow();
        if (block < QKV_BLOCKS) fetch_tokens<HIDDEN / 2, QKV_CHUNKS>(ring, maps[QKV_MATRIX], half * (HIDDEN / 2));
        all_blocks.follow();  // attention begins
        all_blocks.follow();
        if (block < HIDDEN_BLOCKS) fetch_tokens<QUERY / 2, O_CHUNKS>(ring, maps[O_MATRIX], half * (QUERY / 2));
        all_blocks.follow();
        if (block < INNER_BLOCKS) fetch_tokens<HIDDEN, GATE_UP_CHUNKS>(ring, maps[GATE_UP_MATRIX]);
        all_blocks.follow();
        if (block < HIDDEN_BLOCKS) fetch_tokens<INNER / 2, DOWN_CHUNKS>(ring, maps[DOWN_MATRIX], half * (INNER / 2));
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
__device__ __forceinline__ void add_residual(float (&sums)[HIDDEN_TILES][4], Received& received, Shared& shared,
                                             const u32 (&gain)[HIDDEN_TILES][32], u32* residual, u32* hidden,
                                             float* squares, const Thread& me)
{
    exchange(sums, received, me, [&](int tile, int token, const float2 (&values)[1]) {
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
    uint4* values = (uint4*)memory;  // where tokens come to at other times
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
            init(address(&shared.tokens_freed[slot]), WARPS);
        }
        init(address(&shared.received), 1);
        show_barriers_to_copies();
    }
    const Meeting followed(pass.counter, gridDim.x);  // before this block can have arrived
    cluster_meets();
    if (threadIdx.x >= CONSUMERS) {
        keep_registers<40>();
        if (threadIdx.x / 32 == WARPS) fetch_all_weights(rings.weights, pass);
        if (threadIdx.x / 32 == WARPS + 1) fetch_all_tokens(rings.tokens, pass, followed);
        return;
    }
    take_registers<232>();

    const Thread me = this_thread(pass.num_tokens);
    const int block = blockIdx.x;
    const bool has_hidden = block < HIDDEN_BLOCKS;
    float* const squares[2] = {pass.squares, pass.squares + HIDDEN_BLOCKS * TOKENS};
    const int num_splits = pass.batch.num_splits, num_items = pass.batch.num_rows * KV_HEADS;
    const int each = (num_items + gridDim.x - 1) / gridDim.x;  // of a block; mostly of one row
    const int first_item = blockIdx.x / num_splits * each, last_item = min(first_item + each, num_items);
    const Share share = share_of(pass.batch, first_item);
    const Pages pages = first_pages(share, me);  // memory would be slow to answer in each layer
    int turned_at = -1;                          // whose angles are there
    Meeting all_blocks(pass.counter, gridDim.x);
    // of an item; those that it has count for all
    Meeting splits(pass.partials.counters + blockIdx.x / num_splits, MAX_SPLITS);
    Received received{&shared.sums[0][0], address(&shared.received)};
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
            multiply<HIDDEN / 2, QKV_TILES, QKV_CHUNKS>(sums, rings, me);
            consumers_meet();
            exchange(sums, received, me, [&](int tile, int token, const float2 (&values)[1]) {
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
        Ahead ahead;
        if (share.is_any) ask_for_first(ahead, values, share, pages, layer.keys, layer.values, me);
        all_blocks.wait();

        for (int item = first_item; item < last_item; item++) {
            Share mine = share;
            if (item > first_item) {
                mine = share_of(pass.batch, item);
                consumers_meet();  // which have added up results
                ask_for_first(ahead, values, mine, first_pages(mine, me), layer.keys, layer.values, me);
            }
            if (mine.start != turned_at) {
                turned_at = mine.start;
                take_angles(shared.angles, mine.start, mine.num_tokens, pass.batch);
                consumers_meet();
            }
            take_in(shared.queries, values, (const uint4*)pass.qkv, mine, shared.angles, pass.batch, layer.keys,
                    layer.values);
            consumers_meet();
            Found found;
            attend(found, ahead, values, shared.queries, mine, pass.batch.scale, layer.keys, layer.values, me);
            add_up(found, shared.queries, (float*)memory, pass.attended, mine, num_splits, pass.partials, me);
        }
        if (share.is_any && num_splits > 1) {
            splits.arrive(share.split == num_splits - 1 ? MAX_SPLITS - share.split : 1);
            splits.wait();
            combine(pass.attended, share, num_splits, pass.partials);
        }
        all_blocks.meet();

        if (has_hidden) {
            float sums[HIDDEN_TILES][4];
            multiply<QUERY / 2, HIDDEN_TILES, O_CHUNKS>(sums, rings, me);
            add_residual(sums, received, shared, shared.gain[0], nullptr, pass.hidden, squares[0], me);
        }
        all_blocks.meet();

        if (block < INNER_BLOCKS) {
            find_scales(shared, squares[0], pass.eps, me);
            float sums[INNER_TILES][4];
            multiply<HIDDEN, INNER_TILES, GATE_UP_CHUNKS>(sums, rings, me);
            consumers_meet();
            const int row = block * INNER_ROWS + me.warp / 4 * (INNER_ROWS / 2) + 2 * me.pair;
            for_products<2>(sums, me, [&](int tile, int token, const float2 (&values)[2]) {
                handed_on<INNER>(pass.inner, row + tile * 8, token) = gated(values, shared.scale[token]);
            });
        }
        all_blocks.meet();

        if (has_hidden) {
            float sums[HIDDEN_TILES][4];
            multiply<INNER / 2, HIDDEN_TILES, DOWN_CHUNKS>(sums, rings, me);
            u32* residual = pass.residuals + (long long)index * pass.num_tokens * (HIDDEN / 2);
            add_residual(sums, received, shared, shared.gain[1], residual, pass.hidden, squares[1], me);
        }
        layer = next;
    }
    all_blocks.meet();  // no block of a pair ends while the other sends to it
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
