// A decoder's layers, and the order in which a block asks for weights.
//
// streamed_plan.py defines the sizes: HIDDEN, QUERY, INNER, QKV; of each matrix the tiles of 8 rows that a block owns
// and the chunks in a stage; TOKENS; PLANES and ZEROS of weights; SLOTS, SLOT_BYTES, SCRATCH_BYTES, SHARED_BYTES; and
// those of attention.cuh.
#pragma once
#include "attention.cuh"

constexpr int HIDDEN_ROWS = HIDDEN_TILES * 8, INNER_ROWS = INNER_TILES * 8, QKV_ROWS = QKV_TILES * 8;
constexpr int HIDDEN_BLOCKS = HIDDEN / HIDDEN_ROWS, INNER_BLOCKS = INNER / INNER_ROWS, QKV_BLOCKS = QKV / QKV_ROWS;
static_assert(QUERY == HEADS * HEAD_DIM && QKV == ALL_HEADS * HEAD_DIM, "heads");

enum Matrix { QKV_MATRIX, O_MATRIX, GATE_UP_MATRIX, DOWN_MATRIX, MATRICES };
struct Tensors {  // of a layer
    const u32 *attention_norm, *mlp_norm;
    uint4 *keys, *values;
    const float* row_scales[MATRICES];  // of packed words
};
struct Layer {  // as streamed_pass.py packs it
    TensorMap maps[MATRICES][KINDS];
    Tensors tensors;
};

struct Pass {
    const Layer* layers;  // and one more, which has the model's last norm
    const u32* embedded;  // [num_tokens, HIDDEN]
    u32* residuals;       // [num_layers, num_tokens, HIDDEN], behind each layer
    u32* out;             // [num_tokens, HIDDEN], normed
    // what blocks hand on: the first of the sets of streamed_pass.cu
    u32* hidden;          // [2, TOKENS, HIDDEN], in the order of `handed_on`, for each norm
    u32 *qkv;             // [TOKENS, QKV]
    u32 *attended, *inner;  // [TOKENS, size], in the order of `handed_on`
    u32* squares;         // [2, HIDDEN_BLOCKS, TOKENS]
    Partials partials;
    u64* counter;
    Batch batch;
    int num_layers, num_tokens;
    float eps;
    int set_words;        // from one set to the next
};

// Calls `fetch_layer(maps)` for each layer, by one thread of a warp.
template <class Fetch> __device__ __forceinline__ void fetch_all(const Pass& pass, Fetch fetch_layer)
{
    constexpr int MAPS = MATRICES * KINDS;
    const int lane = threadIdx.x % 32;
    for (int index = 0; index < pass.num_layers; index++) {
        const int first = index ? index + 1 : 0, last = min(index + 2, pass.num_layers);  // maps are slow to arrive
        for (int i = first * MAPS + lane; i < last * MAPS; i += 32)
            make_ready(pass.layers[i / MAPS].maps[0][i % MAPS]);
        __syncwarp();
        if (lane == 0) fetch_layer(pass.layers[index].maps);
    }
}

// This thread's pair of a norm's weights, for each of its tiles.
__device__ __forceinline__ const u32* weights_of(const u32* norm, int tile, const Thread& me)
{
    return norm + (blockIdx.x * HIDDEN_ROWS + tile * 8) / 2 + me.pair;
}

// What follows is of pairs of columns.
__device__ __forceinline__ u32 multiplied(u32 pair, u32 by)
{
    return rounded(low(pair) * low(by), high(pair) * high(by));
}
// The squares of a token's 8 columns, which four threads hold.
__device__ __forceinline__ float squares_of(u32 pair)
{
    float square = low(pair) * low(pair) + high(pair) * high(pair);
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    return square;
}
// The sums of a layer, rounded, added to the residual stream.
__device__ __forceinline__ u32 added(u32 residual, float2 sums)
{
    const u32 out = rounded(sums.x, sums.y);
    return rounded(low(residual) + low(out), high(residual) + high(out));
}
// Sums of gates, then of what they multiply. Rounded between the steps, as models are in training.
__device__ __forceinline__ u32 gated(const float2 (&sums)[2], float scale)
{
    const u32 gate = rounded(sums[0].x * scale, sums[0].y * scale);
    const u32 up = rounded(sums[1].x * scale, sums[1].y * scale);
    const float first = __fdividef(low(gate), 1 + __expf(-low(gate)));
    return multiplied(rounded(first, __fdividef(high(gate), 1 + __expf(-high(gate)))), up);
}

// The angles of an item's tokens.
__device__ __forceinline__ void take_angles(float (&angles)[ROW_TOKENS][HEAD_DIM], int start, int num_tokens,
                                            const Batch& batch)
{
    for (int i = threadIdx.x; i < num_tokens * HEAD_DIM; i += CONSUMERS) {
        const long long position = batch.positions[start + i / HEAD_DIM];
        angles[i / HEAD_DIM][i % HEAD_DIM] = batch.cos_sin[position * HEAD_DIM + i % HEAD_DIM];
    }
}
