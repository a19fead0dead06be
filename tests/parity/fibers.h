// A kernel on the host: every thread of every block is a fiber, which goes on until it has to wait. THREADS of a block
// and bytes of SHARED memory are those of the kernel. What its instructions order they tell races.h.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "races.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

constexpr int STACK_BYTES = 32 << 10;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
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
    ucontext_t start;
    jmp_buf left;  // a ucontext would ask the system each time
    Index thread, block;
    int place;  // of its block among those that run
    bool has_started, ended;
    std::vector<std::function<void()>> begun;  // products and copies, which are made when they are waited for
    std::deque<size_t> committed;              // how many had begun by then
    unsigned commitments = 0;
};

static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static Fiber* self;
static jmp_buf scheduler;
static Index gridDim;
#define threadIdx self->thread
#define blockIdx self->block

static Block& here() { return blocks[self->place]; }
static Warp& warp() { return here().warps[threadIdx.x / 32]; }
static void give_way()
{
    if (!_setjmp(self->left)) _longjmp(scheduler, 1);
}
static void go_on(Fiber& fiber)  // until it gives way
{
    self = &fiber, races::running = self - fibers.data();
    if (_setjmp(scheduler)) return;
    if (fiber.has_started) _longjmp(fiber.left, 1);
    fiber.has_started = true;
    setcontext(&fiber.start);
}
static void meet(Gathering& gathering, int size, races::Order order)
{
    races::release(&gathering, order);
    const long number = gathering.number;
    if (++gathering.here == size) gathering.here = 0, gathering.number++, races::complete(&gathering);
    while (gathering.number == number) give_way();
    races::acquire(&gathering, order);
}

static void __syncthreads() { meet(here().all, THREADS, races::SYNCTHREADS); }
static void __syncwarp() { meet(warp().gathering, 32, races::SYNCWARP); }
static void warp_meets() { meet(warp().gathering, 32, races::NOTHING); }  // for instructions of all of it together
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
static void __threadfence() { races::fence(); }
static float quick_exp(float x) { return expf(x); }
#define __expf quick_exp
static float __fdividef(float x, float y) { return x / y; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static float __shfl_xor_sync(unsigned, float value, int distance)
{
    warp().shown[threadIdx.x % 32] = bits_of(value);
    warp_meets();
    const float other = __uint_as_float(warp().shown[threadIdx.x % 32 ^ distance]);
    warp_meets();
    return other;
}

static void (*work)();
static void run_thread()
{
    work();
    self->ended = true;
    give_way();
}

// False: they wait for ever. Seeds have blocks of other speeds.
static bool run_blocks(Index grid, void (*kernel)(), int seed)
{
    work = kernel, gridDim = grid, srand(seed);
    const int num_blocks = grid.x * grid.y * grid.z;
    blocks = std::vector<Block>(num_blocks);
    fibers = std::vector<Fiber>(num_blocks * THREADS);
    std::vector<char> stacks(fibers.size() * STACK_BYTES);
    constexpr int BYTES = (SHARED + 1023) / 1024 * 1024;
    unsigned char* const memory = (unsigned char*)aligned_alloc(1024, num_blocks * BYTES);
    memset(memory, 0xff, num_blocks * BYTES);  // NaN
    for (int place = 0; place < num_blocks; place++) blocks[place].memory = memory + place * BYTES;
    races::begin(memory, BYTES, num_blocks, THREADS);
    for (size_t i = 0; i < fibers.size(); i++) {
        Fiber& fiber = fibers[i];
        const int place = i / THREADS;
        fiber.thread.x = i % THREADS, fiber.place = place, fiber.has_started = fiber.ended = false;
        fiber.block = {place % grid.x, place / grid.x % grid.y, place / grid.x / grid.y};
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = &stacks[i * STACK_BYTES], fiber.start.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.start, run_thread, 0);
    }
    size_t running = fibers.size();
    for (long rounds = 0; running && rounds < 200000; rounds++) {
        running = 0;
        const int offset = rand() % 4;  // blocks are not equally fast
        for (Fiber& fiber : fibers) {
            if (fiber.ended) continue;
            running++;
            if ((fiber.place + offset) % 4 == rounds / 256 % 4) continue;
            go_on(fiber);
        }
    }
    races::end(!running);
    free(memory);
    return !running;
}
