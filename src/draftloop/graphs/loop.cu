// Last node in the body of a device loop: passes what the iteration emitted to the host, and decides whether
// another one follows. One block. Its twin in Python is TapeLoop; WORD_* and STOP_* are defined by cuda_loop.py.
//
// Where several ranks repeat the same iterations, rank 0 decides: it alone has a host to hear, and a ring. It writes
// its decision into the memory of the others, which wait for it there. One word each is enough: the next decision
// comes after an iteration in which rank 0 has waited for all of them.

extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

extern "C" __global__ void next_iteration(
    unsigned long long loop,         // handle of the WHILE node
    long long* number,               // device memory: iterations published so far
    volatile long long* words,       // pinned memory: what host and device tell each other
    int* slots,                      // pinned memory: the ring, num_slots x slot_size
    const int* rows,                 // num_rows
    const int* outcome,              // num_rows x width: column 0 counts the tokens, which begin at first_token
    const int* num_tokens, const int* max_tokens, const int* stop_ids,  // per engine row
    const unsigned long long* decisions,  // num_ranks addresses, each of a word that its rank waits at; null for one
    int num_rows, int width, int first_token, int num_stop_ids, int padding_row, int num_slots, int slot_size,
    int rank, int num_ranks)
{
    if (rank > 0) {
        if (threadIdx.x != 0) return;
        const long long next = *number + 1;
        const volatile long long* decision = (const volatile long long*)decisions[rank];
        long long seen;
        do { seen = *decision; } while (seen / STOP_KINDS < next);
        *number = next;
        cudaGraphSetConditional(loop, seen % STOP_KINDS == STOP_NONE);
        return;
    }
    __shared__ int row_ended;
    const long long index = *number;
    int* slot = slots + (index % num_slots) * slot_size;
    long long read = 0, interrupt = 0, launch = 0, limit = 0;
    if (threadIdx.x == 0) {
        row_ended = 0;
        // asked first, since the answer takes a microsecond to come over the bus
        read = words[WORD_READ];
        interrupt = words[WORD_INTERRUPT];
        launch = words[WORD_LAUNCH];
        limit = words[WORD_LIMIT];
    }
    __syncthreads();

    for (int i = threadIdx.x; i < num_rows * width; i += blockDim.x) slot[1 + i] = outcome[i];
    for (int r = threadIdx.x; r < num_rows; r += blockDim.x) {
        const int row = rows[r];
        if (row == padding_row) continue;
        const int* emitted = outcome + r * width;
        bool ended = num_tokens[row] >= max_tokens[row];
        for (int q = 0; q < emitted[0]; q++)
            for (int s = 0; s < num_stop_ids; s++)
                ended |= emitted[first_token + q] == stop_ids[row * num_stop_ids + s];
        if (ended) row_ended = 1;
    }
    __threadfence_system();  // the slot is there before it is announced
    __syncthreads();
    if (threadIdx.x != 0) return;

    const int reason = row_ended                       ? STOP_ROW_ENDED
                       : interrupt >= launch           ? STOP_INTERRUPTED
                       : index + 1 >= limit            ? STOP_COUNT
                       : index + 1 - read >= num_slots ? STOP_RING_FULL
                                                       : STOP_NONE;
    for (int r = 1; r < num_ranks; r++)
        *(volatile long long*)decisions[r] = (index + 1) * STOP_KINDS + reason;
    slot[0] = reason;
    *number = index + 1;
    __threadfence_system();
    words[WORD_PUBLISHED] = index + 1;
    cudaGraphSetConditional(loop, reason == STOP_NONE);
}
