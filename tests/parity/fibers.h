// A kernel on the host: every thread of every block is a fiber, which goes on until it has to wait. THREADS of a block
// and bytes of SHARED memory are those of the kernel.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

constexpr int STACK_BYTES = 32 << 10;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
struct Index { int x = 0, y = 0, z = 0; };
struct Gathering { int here = 0; long number = 0; };
struct Barrier { int expected, missing; long bytes; unsigned phase; };  // an mbarrier
struct Warp {
    Gathering gathering;
    unsigned shown[32];
    float a[16][16], b[16][8];  // of a product, which all of its threads have
};
struct Block {
    unsigned char* memory;
    Gathering all, some, cluster;
    Warp warps[12];
    std::map<unsigned, Barrier> barriers;
};
struct Fiber {
    ucontext_t context;
    Index thread, block;
    int place;  // of its block among those that run
    bool ended;
    std::vector<std::function<void()>> begun;  // products and copies, which are made when they are waited for
    std::deque<size_t> committed;              // how many had begun by then
};

static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static Fiber* self;
static ucontext_t scheduler;
static Index gridDim;
#define threadIdx self->thread
#define blockIdx self->block

static Block& here() { return blocks[self->place]; }
static Warp& warp() { return here().warps[threadIdx.x / 32]; }
static void give_way() { swapcontext(&self->context, &scheduler); }
static void meet(Gathering& gathering, int size)
{
    const long number = gathering.number;
    if (++gathering.here == size) gathering.here = 0, gathering.number++;
    while (gathering.number == number) give_way();
}

static void __syncthreads() { meet(here().all, THREADS); }
static void __syncwarp() { meet(warp().gathering, 32); }
static void __trap() { abort(); }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;
static float __uint_as_float(unsigned bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static unsigned bits_of(float value)
{
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
#define __float_as_uint bits_of
static void __threadfence() {}
static float quick_exp(float x) { return expf(x); }
#define __expf quick_exp
static float __fdividef(float x, float y) { return x / y; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static float __shfl_xor_sync(unsigned, float value, int distance)
{
    warp().shown[threadIdx.x % 32] = bits_of(value);
    __syncwarp();
    const float other = __uint_as_float(warp().shown[threadIdx.x % 32 ^ distance]);
    __syncwarp();
    return other;
}

static void (*work)();
static void run_thread()
{
    work();
    self->ended = true;
    give_way();
}

// False: they wait for ever.
static bool run_blocks(Index grid, void (*kernel)())
{
    work = kernel, gridDim = grid;
    const int num_blocks = grid.x * grid.y * grid.z;
    blocks = std::vector<Block>(num_blocks);
    fibers = std::vector<Fiber>(num_blocks * THREADS);
    std::vector<char> stacks(fibers.size() * STACK_BYTES);
    for (Block& block : blocks) {
        block.memory = (unsigned char*)aligned_alloc(1024, (SHARED + 1023) / 1024 * 1024);
        memset(block.memory, 0xff, SHARED);  // NaN
    }
    for (size_t i = 0; i < fibers.size(); i++) {
        Fiber& fiber = fibers[i];
        const int place = i / THREADS;
        fiber.thread.x = i % THREADS, fiber.place = place, fiber.ended = false;
        fiber.block = {place % grid.x, place / grid.x % grid.y, place / grid.x / grid.y};
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = &stacks[i * STACK_BYTES], fiber.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.context, run_thread, 0);
    }
    size_t running = fibers.size();
    for (long rounds = 0; running && rounds < 200000; rounds++) {
        running = 0;
        const int offset = rand() % 4;  // blocks are not equally fast
        for (Fiber& fiber : fibers) {
            if (fiber.ended) continue;
            running++;
            if ((fiber.place + offset) % 4 == rounds / 256 % 4) continue;
            self = &fiber;
            swapcontext(&scheduler, &fiber.context);
        }
    }
    for (Block& block : blocks) free(block.memory);
    return !running;
}
