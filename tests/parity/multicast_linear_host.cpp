// multicast_linear.cu on the host. Blocks of a cluster are neighbours along x or z, and the copy engine brings zeros for
// what is behind the last token, which those of passes do not.

constexpr int THREADS = 384, SHARED = MEMORY_BYTES;
#include "fibers.h"

#define STAND_INS "stand_ins.h"
#define CLUSTER_RANK ((WEIGHTS_SHARED ? blockIdx.z : blockIdx.x) % CLUSTER)
#define CLUSTER_STEP (WEIGHTS_SHARED ? gridDim.x * gridDim.y : 1)
#include "instructions.cuh"

struct Rows {  // a TensorMap
    const unsigned char* values;
    long rows, columns, box_rows, halves;  // of rows; a box takes eights of each in turn
};
static void copy_box(Block& block, u32 to, const TensorMap& map, int column, int first, u32 at)
{
    Rows rows;
    memcpy(&rows, &map, sizeof rows);
    if (to % 1024 || column + 64 > rows.columns) abort();
    for (int line = 0; line < rows.box_rows; line++) {
        const long row = line / 8 % rows.halves * (rows.rows / rows.halves) + first + line / 8 / rows.halves * 8 + line % 8;
        for (int part = 0; part < 8; part++) {
            unsigned char* there = block.memory + to + line * 128 + (part ^ line % 8) * 16;
            races::copy_in(there, 16, block.memory + at);
            races::Quiet quiet;
            if (row < rows.rows) memcpy(there, rows.values + (row * rows.columns + column + part * 8) * 2, 16);
            else memset(there, 0, 16);
        }
    }
    Barrier& barrier = block.barriers.at(at);
    barrier.bytes -= rows.box_rows * 128;
    settle(block, at);
}
static void copy_tokens(u32 to, const TensorMap& map, int column, int row, u32 at, u64)
{
    copy_box(here(), to, map, column, row, at);
}
static void copy_rows(u32 to, const TensorMap& map, int column, int eights, u32 at, u64)
{
    copy_box(here(), to, map, column, eights * 8, at);
}
static void copy_to_all(u32 to, const TensorMap& map, int column, int row, u32 at, int mask)
{
    for (int rank = 0; rank < CLUSTER; rank++)
        if (mask >> rank & 1) copy_box(of_cluster(rank), to, map, column, row, at);
}
static void copy_rows_to_all(u32 to, const TensorMap& map, int column, int eights, u32 at, int mask, u64)
{
    copy_to_all(to, map, column, eights * 8, at, mask);
}
static u64 read_often() { return 0; }
template <int TILES> static void multiply_add(float (&sums)[TILES][4], u64 rows, u64 columns)
{
    multiply_add_64<0, TILES>(sums, rows, columns);
}

#include "multicast_linear.cu"

static TensorMap given_weights, given_tokens;
static Product given;

extern "C" bool launch(int x, int y, int z, int seed, const Rows& weights, const Rows& tokens, const Product& product)
{
    memcpy(&given_weights, &weights, sizeof weights), memcpy(&given_tokens, &tokens, sizeof tokens);
    given = product;
    return run_blocks({x, y, z}, [] { multicast_linear(given_weights, given_tokens, given); }, seed);
}
