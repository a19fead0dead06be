// Which accesses of a kernel that runs on fibers nothing orders: vector clocks, over shared and watched global memory.
//
// The kernel is compiled with -fsanitize=thread, so that its loads and stores are calls of races.cpp, which is neither
// compiled so nor linked with the sanitizer's own runtime. What orders them, and what copies and products do beside the
// threads, stand-ins of instructions tell.
//
// The model is PTX's where it has a word for it: barriers, and releases that are acquired, order all memory. Words that
// blocks hand on (relaxed) order nothing there. Here whoever has seen one comes behind the loads that its thread had
// made, since it was stored when they were over, with all that it writes; and behind what was fenced before, with words
// and what it writes to their places, since they meet in L2. This takes what is stored to follow from what was loaded
// before, and what is written from the words that were seen: PTX's model has no order by dependency.
#pragma once
#include <cstddef>

namespace races {
// What a test can have forgotten: threads wait for it still, but it orders nothing.
enum Order {
    NOTHING, SYNCTHREADS, SYNCWARP, NAMED_BARRIER, CLUSTER_BARRIER, MBARRIER, COPY_ENGINE, SHOWN_BARRIERS, THREADS_COPIES,
    PRODUCTS, WORDS, COUNTER, THREADFENCE, ORDERS
};

extern int running;  // fiber
struct Quiet {       // loads and stores are the emulator's meanwhile
    Quiet();         // not inline: compilers hold that the sanitizer's functions read nothing
    ~Quiet();
};

void begin(const void* shared, size_t bytes_of_block, int num_blocks, int num_threads);  // of a block
void end(bool is_whole);  // else threads still wait

// Whoever has released before it was completed is known to whoever acquires behind that.
void release(const void* signal, Order);
void complete(const void* signal);
void acquire(const void* signal, Order);
void add_released(const void* word);  // of the whole GPU; what others have added is kept
void acquire_word(const void* word);
void fence();

// mbarriers, at their places in shared memory
void init(const void* barrier);
void show_barriers();
void arrive(const void* barrier);
void look(const void* barrier);  // that has completed

void load_word(const void* at, size_t bytes);
void store_word(const void* at, size_t bytes);
void copy_in(const void* to, size_t bytes, const void* barrier);  // by the copy engine, which that barrier waits for
// By this thread, from null: zeros; and by this warp's tensor core. So many commitments are over when that is.
void copy_later(const void* to, const void* from, size_t bytes, unsigned commitment);
void await_copies(unsigned commitments);
void multiply_later(const void* from, size_t bytes, unsigned commitment);
void await_products(unsigned commitments);
}
