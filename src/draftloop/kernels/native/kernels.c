// The model's operations on CPU tensors, float32, for passes of few tokens. Plain C ABI, called by ops.py.
//
// Such a pass reads every weight once, so its time is that of memory; everything else must be small beside it.
// A token's result never depends on how many others there are, nor on the number of threads: every sum
// is added up in one order.
//
// Shape suffixes: T tokens, N output columns, K input columns, H hidden size, I inner size of the MLP, Q query
// heads, G key/value heads, D head size, R entries of the batch, P pages, S tokens per page.

#include "vectors.h"

// --- linear: out[T, N] = x[T, K] @ weight[N, K]^T + bias[N] ---

// Weights are float32, or bf16 (`narrow`): the upper halves of float32, which are widened in registers. The sums are
// those of the widened weights, bit for bit. `narrow`, `rows` and `tokens` are constants where these are inlined.

INLINE const void *weight_at(const void *weight, int64_t i, const int narrow) {
    return (const char *)weight + i * (narrow ? sizeof(uint16_t) : sizeof(float));
}

INLINE vec widened(halves bits) { return (vec)(__builtin_convertvector(bits, words) << 16); }

INLINE vec load_weights(const void *p, const int narrow) {
    return narrow ? widened(*(const halves_at *)p) : load(p);
}

// The last, fewer than LANES.
INLINE vec load_last(const float *p, int64_t count) {
    vec v = {0};
    memcpy(&v, p, count * sizeof(float));
    return v;
}

INLINE vec load_last_weights(const void *p, int64_t count, const int narrow) {
    if (!narrow) return load_last(p, count);
    halves bits = {0};
    memcpy(&bits, p, count * sizeof(uint16_t));
    return widened(bits);
}

// One tile, whose `sums` live in registers.
INLINE void linear_tile(const float *x, const void *weight, const float *bias, float *out, int64_t N, int64_t K,
                        const int narrow, const int rows, const int tokens) {
    vec sums[ROWS][TOKENS] = {{{0}}}, w[ROWS];
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        UNROLL for (int r = 0; r < rows; r++) {
            const char *at = weight_at(weight, r * K + k, narrow);
            w[r] = load_weights(at, narrow);
            __builtin_prefetch(at + AHEAD);
        }
        UNROLL for (int t = 0; t < tokens; t++) {
            vec input = load(x + t * K + k);
            UNROLL for (int r = 0; r < rows; r++) sums[r][t] = multiply_add(w[r], input, sums[r][t]);
        }
    }
    if (k < K) {
        UNROLL for (int r = 0; r < rows; r++)
            w[r] = load_last_weights(weight_at(weight, r * K + k, narrow), K - k, narrow);
        UNROLL for (int t = 0; t < tokens; t++) {
            vec input = load_last(x + t * K + k, K - k);
            UNROLL for (int r = 0; r < rows; r++) sums[r][t] = multiply_add(w[r], input, sums[r][t]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < rows; r++) out[t * N + r] = sum_of(sums[r][t]) + (bias ? bias[r] : 0.0f);
}

// All tokens, by blocks: the rows of the weight come from memory for the first, and from the cache after that.
INLINE void linear_rows(const float *x, const void *weight, const float *bias, float *out, int64_t T, int64_t N,
                        int64_t K, const int narrow, const int rows) {
    for (int64_t t = 0; t < T; t += TOKENS, x += TOKENS * K, out += TOKENS * N) {
        switch (min(T - t, TOKENS)) {
            case 1: linear_tile(x, weight, bias, out, N, K, narrow, rows, 1); break;
            case 2: linear_tile(x, weight, bias, out, N, K, narrow, rows, 2); break;
            case 3: linear_tile(x, weight, bias, out, N, K, narrow, rows, 3); break;
            case 4: linear_tile(x, weight, bias, out, N, K, narrow, rows, 4); break;
#if defined(__AVX__)
            case 5: linear_tile(x, weight, bias, out, N, K, narrow, rows, 5); break;
            case 6: linear_tile(x, weight, bias, out, N, K, narrow, rows, 6); break;
#endif
        }
    }
}

INLINE void linear(const float *x_TK, const void *weight_NK, const float *bias_N, float *out_TN, int64_t T, int64_t N,
                   int64_t K, const int narrow, int threads) {
    const int64_t whole = N / ROWS;
    // dynamic: a thread that other work keeps from running would hold up all others. Chunks of about 128 KB
    const int64_t chunk = max(1, (narrow ? 1 << 16 : 1 << 15) / (ROWS * K));
#pragma omp parallel for schedule(dynamic, chunk) num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < whole; block++) {
        int64_t n = block * ROWS;
        linear_rows(x_TK, weight_at(weight_NK, n * K, narrow), bias_N ? bias_N + n : 0, out_TN + n, T, N, K, narrow,
                    ROWS);
    }
    for (int64_t n = whole * ROWS; n < N; n++)
        linear_rows(x_TK, weight_at(weight_NK, n * K, narrow), bias_N ? bias_N + n : 0, out_TN + n, T, N, K, narrow, 1);
}

void dl_linear(const float *x_TK, const void *weight_NK, const float *bias_N, float *out_TN, int64_t T, int64_t N,
               int64_t K, int narrow, int threads) {
    if (narrow)
        linear(x_TK, weight_NK, bias_N, out_TN, T, N, K, 1, threads);
    else
        linear(x_TK, weight_NK, bias_N, out_TN, T, N, K, 0, threads);
}

// --- the small operations: serial, since threads would cost more than they save ---

INLINE void norm_row(const float *x, const float *weight, float *out, int64_t size, float eps) {
    float scale = 1.0f / sqrtf(dot(x, x, size) / size + eps);
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

void dl_rms_norm(const float *x_TH, const float *weight_H, float *out_TH, int64_t T, int64_t H, float eps) {
    for (int64_t t = 0; t < T; t++) norm_row(x_TH + t * H, weight_H, out_TH + t * H, H, eps);
}

void dl_add_rms_norm(const float *x_TH, const float *residual_TH, const float *weight_H, float *normed_TH,
                     float *sum_TH, int64_t T, int64_t H, float eps) {
    for (int64_t t = 0; t < T; t++) {
        float *sum = sum_TH + t * H;
        for (int64_t h = 0; h < H; h++) sum[h] = x_TH[t * H + h] + residual_TH[t * H + h];
        norm_row(sum, weight_H, normed_TH + t * H, H, eps);
    }
}

void dl_norm_concat(const float *first_TH, const float *second_TH, const float *first_weight_H,
                    const float *second_weight_H, float *out_T2H, int64_t T, int64_t H, float eps) {
    for (int64_t t = 0; t < T; t++) {
        norm_row(first_TH + t * H, first_weight_H, out_T2H + 2 * t * H, H, eps);
        norm_row(second_TH + t * H, second_weight_H, out_T2H + (2 * t + 1) * H, H, eps);
    }
}

void dl_silu_mul(const float *gate_up_T2I, float *out_TI, int64_t T, int64_t I) {
    for (int64_t t = 0; t < T; t++) {
        const float *gate = gate_up_T2I + 2 * t * I, *up = gate + I;
        float *out = out_TI + t * I;
#pragma omp simd
        for (int64_t i = 0; i < I; i++) out[i] = gate[i] / (1.0f + exp_of(-gate[i])) * up[i];
    }
}

// A cache of one layer: key at `base`, value `side_stride` after it. Strides count floats.
typedef struct {
    float *base;
    int64_t side_stride, page_stride, token_stride, head_stride, num_pages, page_size;
} Cache;

// Head norms, rotary embedding, keys and values to their slots, queries to `q`. Returns -1, having done part
// of the work, if a position or slot does not exist.
int dl_rope_write(const float *qkv_TE, const int64_t *positions_T, const int64_t *slots_T, const float *cos_sin_LD,
                  const float *q_norm_D, const float *k_norm_D, float *q_TQD, float *kv_base, int64_t side_stride,
                  int64_t page_stride, int64_t token_stride, int64_t head_stride, int64_t num_pages,
                  int64_t page_size, int64_t T, int64_t L, int64_t Q, int64_t G, int64_t D, int64_t rotary_dim,
                  float eps) {
    const int64_t half = rotary_dim / 2;
    float normed[D];
    for (int64_t t = 0; t < T; t++) {
        const int64_t position = positions_T[t], slot = slots_T[t];
        if (position < 0 || position >= L || slot < 0 || slot >= num_pages * page_size) return -1;
        const float *cos = cos_sin_LD + position * rotary_dim, *sin = cos + half;
        float *key = kv_base + slot / page_size * page_stride + slot % page_size * token_stride;
        const float *in = qkv_TE + t * (Q + 2 * G) * D;
        for (int64_t head = 0; head < Q + G; head++, in += D) {
            float *out = head < Q ? q_TQD + (t * Q + head) * D : key + (head - Q) * head_stride;
            const float *x = in;
            if (q_norm_D) {
                norm_row(in, head < Q ? q_norm_D : k_norm_D, normed, D, eps);
                x = normed;
            }
            for (int64_t i = 0; i < half; i++) {
                out[i] = x[i] * cos[i] - x[half + i] * sin[i];
                out[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
            }
            for (int64_t i = rotary_dim; i < D; i++) out[i] = x[i];
        }
        for (int64_t g = 0; g < G; g++, in += D) memcpy(key + side_stride + g * head_stride, in, D * sizeof(float));
    }
    return 0;
}

// --- paged attention ---

enum { BLOCK = 64 };  // keys whose scores are held at once

// out[D] += the sum of weight[j] * v[j]. `width` vectors at a time, so that their sums do not wait for each other.
INLINE void mix(const float *weight, const float *v, int64_t stride, int64_t n, float *out, const int width) {
    vec sums[4];
    UNROLL for (int i = 0; i < width; i++) sums[i] = load(out + i * LANES);
    for (int64_t j = 0; j < n; j++)
        UNROLL for (int i = 0; i < width; i++) sums[i] += weight[j] * load(v + j * stride + i * LANES);
    UNROLL for (int i = 0; i < width; i++) store(out + i * LANES, sums[i]);
}

static inline float tanh_of(float x) {
    const float e = exp_of(-2 * (x < 0 ? -x : x)), size = (1 - e) / (1 + e);
    return x < 0 ? -size : size;
}

// One query head of one token against the keys first .. last - 1: softmax block by block, rescaled as the
// maximum grows. `pages` has the page of every `page_size` keys. `sink`, if not null, is the score of a key without a
// value that comes before them.
static void attend(const float *q, const float *keys, const int32_t *pages, int64_t first, int64_t last,
                   const Cache *cache, int64_t D, float scale, float cap, const float *sink, float *out) {
    const int64_t stride = cache->token_stride, size = cache->page_size;
    float best = sink ? *sink : -INFINITY, total = sink ? 1 : 0;
    memset(out, 0, D * sizeof(float));
    for (int64_t start = first; start < last;) {
        // blocks end at fixed places, so that sums do not depend on where a pass begins
        const int64_t end = min(last, start - start % BLOCK + BLOCK);
        float weight[BLOCK], top = best, sum = 0;
        for (int64_t at = start, n; at < end; at += n) {  // page by page
            const float *k = keys + pages[at / size] * cache->page_stride + at % size * stride;
            n = min(end - at, size - at % size);
            for (int64_t j = 0; j < n; j++) {
                for (int64_t d = 0; d < D; d += 16) __builtin_prefetch(k + cache->side_stride + j * stride + d);
                const float scaled = dot(q, k + j * stride, D) * scale;
                const float score = weight[at - start + j] = cap > 0 ? cap * tanh_of(scaled / cap) : scaled;
                top = score > top ? score : top;
            }
        }
        const int64_t count = end - start;
#pragma omp simd
        for (int64_t j = 0; j < count; j++) weight[j] = exp_of(weight[j] - top);
        for (int64_t j = 0; j < count; j++) sum += weight[j];
        if (total != 0 && top != best) {
            const float shrink = exp_of(best - top);
            for (int64_t d = 0; d < D; d++) out[d] *= shrink;
            total *= shrink;
        }
        for (int64_t at = start, n; at < end; at += n) {
            const float *v = keys + cache->side_stride + pages[at / size] * cache->page_stride + at % size * stride;
            n = min(end - at, size - at % size);
            int64_t d = 0;
            for (; d + 4 * LANES <= D; d += 4 * LANES) mix(weight + (at - start), v + d, stride, n, out + d, 4);
            for (; d < D; d += LANES) mix(weight + (at - start), v + d, stride, n, out + d, 1);
        }
        total += sum;
        best = top;
        start = end;
    }
    for (int64_t d = 0; d < D; d++) out[d] /= total;
}

// Entries of at most `max_query_len` tokens; the others are left to the caller. query_starts_R1 may be null
// if every entry has `max_query_len` tokens. Returns -1, having written nothing, if a page that must be read
// does not exist.
int dl_paged_attention(const float *q_TQD, const int32_t *rows_R, const int32_t *query_starts_R1,
                       const int32_t *kv_lens_R, const int32_t *page_table_MN, float *out_TQD, float *kv_base,
                       const float *sinks_Q, int64_t side_stride, int64_t page_stride, int64_t token_stride,
                       int64_t head_stride, int64_t num_pages, int64_t page_size, int64_t T, int64_t R, int64_t M,
                       int64_t N, int64_t Q, int64_t G, int64_t D, int64_t max_query_len, int causal, int64_t window,
                       float scale, float cap, int threads) {
    const Cache cache = {kv_base, side_stride, page_stride, token_stride, head_stride, num_pages, page_size};
    int64_t work = 0;
    for (int64_t r = 0; r < R; r++) {
        const int64_t start = query_starts_R1 ? query_starts_R1[r] : r * max_query_len;
        const int64_t len = (query_starts_R1 ? query_starts_R1[r + 1] : start + max_query_len) - start;
        if (len == 0 || len > max_query_len || kv_lens_R[r] <= 0) continue;
        if (start < 0 || len < 0 || start + len > T || rows_R[r] < 0 || rows_R[r] >= M || kv_lens_R[r] > N * page_size)
            return -1;
        const int64_t first = window && kv_lens_R[r] > len + window ? (kv_lens_R[r] - len + 1 - window) / page_size : 0;
        for (int64_t i = first; i * page_size < kv_lens_R[r]; i++) {
            const int32_t page = page_table_MN[rows_R[r] * N + i];
            if (page < 0 || page >= num_pages) return -1;
        }
        work += len * kv_lens_R[r];
    }
    const int64_t group = Q / G;
    // heads of one group share their keys: one after the other, they find them in the cache
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (threads > 1 && work * Q * D > 1 << 17)
    for (int64_t r = 0; r < R; r++)
        for (int64_t head = 0; head < Q; head++) {
            const int64_t start = query_starts_R1 ? query_starts_R1[r] : r * max_query_len;
            const int64_t len = (query_starts_R1 ? query_starts_R1[r + 1] : start + max_query_len) - start;
            if (len > max_query_len) continue;
            const int64_t kv_len = kv_lens_R[r];
            const float *keys = cache.base + head / group * cache.head_stride;
            for (int64_t i = 0; i < len; i++) {
                const int64_t position = kv_len - len + i, at = ((start + i) * Q + head) * D;
                const int64_t first = window ? max(0, position - window + 1) : 0;
                const int64_t last = causal ? position + 1 : kv_len;
                if (kv_len <= 0 || first >= last)
                    memset(out_TQD + at, 0, D * sizeof(float));
                else
                    attend(q_TQD + at, keys, page_table_MN + rows_R[r] * N, first, last, &cache, D, scale, cap,
                           sinks_Q ? sinks_Q + head : 0, out_TQD + at);
            }
        }
    // padding tokens past the last entry's
    const int64_t end = query_starts_R1 ? query_starts_R1[R] : R * max_query_len;
    if (end < T) memset(out_TQD + end * Q * D, 0, (T - end) * Q * D * sizeof(float));
    return 0;
}

// --- row state: see row_tokens.py, write_draft.py and sampling/accept_block.py ---

// Returns -1, having written nothing, if a row or a position does not exist.
int dl_row_tokens(const int32_t *rows_R, const int32_t *tokens_ML, const int32_t *num_tokens_M,
                  const int32_t *drafts_MK, const int32_t *page_table_MN, const int32_t *num_drafted_M,
                  const int32_t *emitted_R, int64_t *ids_T, int64_t *positions_T, int64_t *slots_T,
                  int32_t *kv_lens_R, int32_t *query_starts_R1, int64_t *last_R, int64_t R, int64_t M, int64_t L,
                  int64_t K, int64_t N, int64_t num_per_row, int64_t page_size, int64_t offset, int64_t ahead,
                  int64_t num_ids) {
    for (int64_t r = 0; r < R; r++) {
        const int64_t row = rows_R[r];
        if (row < 0 || row >= M) return -1;
        const int64_t first = num_tokens_M[row] + offset + (num_drafted_M ? num_drafted_M[row] : 0) -
                              (emitted_R ? emitted_R[r] : 0);
        if (row != M - 1 && (first < 0 || first + num_per_row > N * page_size || num_tokens_M[row] > L)) return -1;
    }
    for (int64_t r = 0; r < R; r++) {
        const int64_t row = rows_R[r], length = num_tokens_M[row], padding = row == M - 1;
        const int64_t first = length + offset + (num_drafted_M ? num_drafted_M[row] : 0) -
                              (emitted_R ? emitted_R[r] : 0);
        for (int64_t q = 0; q < num_per_row; q++) {
            const int64_t at = r * num_per_row + q, position = padding ? 0 : first + q;
            const int64_t wanted = position + ahead, draft = wanted - length;
            const int64_t id = draft < 0 ? tokens_ML[row * L + wanted] : draft < K ? drafts_MK[row * K + draft] : 0;
            ids_T[at] = id >= 0 && id < num_ids ? id : 0;
            positions_T[at] = position;
            slots_T[at] = page_table_MN[row * N + position / page_size] * page_size + position % page_size;
        }
        kv_lens_R[r] = padding ? 0 : first + num_per_row;
        query_starts_R1[r] = r * num_per_row;
        last_R[r] = r * num_per_row + (emitted_R ? min(max(emitted_R[r] - 1, 0), num_per_row - 1) : num_per_row - 1);
    }
    query_starts_R1[R] = R * num_per_row;
    return 0;
}

// Returns -1, having written nothing, if a row, a token or the place of a draft does not exist.
int dl_write_draft(const int32_t *rows_R, const int64_t *tokens_R, int32_t *drafts_MK, int32_t *num_drafted_M,
                   const int32_t *draft_limit_M, const int32_t *num_tokens_M, const int64_t *target_ids_W, int64_t R,
                   int64_t M, int64_t K, int64_t W, int first, int64_t longest) {
    for (int64_t r = 0; r < R; r++) {
        if (rows_R[r] < 0 || rows_R[r] >= M || (target_ids_W && (tokens_R[r] < 0 || tokens_R[r] >= W))) return -1;
        if (!first && num_drafted_M[rows_R[r]] >= K) return -1;
    }
    for (int64_t r = 0; r < R; r++) {
        const int64_t row = rows_R[r], index = first ? 0 : num_drafted_M[row];
        const int64_t token = target_ids_W ? target_ids_W[tokens_R[r]] : tokens_R[r];
        const int allowed = index < draft_limit_M[row] && num_tokens_M[row] + index < longest;
        drafts_MK[row * K + index] = allowed ? token : -1;
        num_drafted_M[row] = row == M - 1 ? 0 : index + 1;
    }
    return 0;
}

// Greedy acceptance; a target below 0 had bad logits, and nothing is emitted from there on. Returns -1, having written
// nothing, if a row does not exist or has no room for its tokens.
int dl_accept_block(const int32_t *rows_R, const int64_t *targets_RQ, const int32_t *drafts_MK, int32_t *tokens_ML,
                    int32_t *num_tokens_M, const int32_t *max_tokens_M, int32_t *num_emitted_R, int32_t *outcome_RO,
                    int64_t R, int64_t M, int64_t K, int64_t L, int64_t num_drafts, int64_t width) {
    for (int64_t r = 0; r < R; r++)
        if (rows_R[r] < 0 || rows_R[r] >= M || max_tokens_M[rows_R[r]] > L || num_tokens_M[rows_R[r]] < 0) return -1;
    for (int64_t r = 0; r < R; r++) {
        const int64_t row = rows_R[r], *targets = targets_RQ + r * (num_drafts + 1);
        const int32_t *drafts = drafts_MK + row * K;
        int32_t *outcome = outcome_RO + r * (3 + width);
        int64_t accepted = 0, drafted = 0;
        while (accepted < num_drafts && targets[accepted] >= 0 && drafts[accepted] == targets[accepted]) accepted++;
        for (int64_t k = 0; k < num_drafts; k++) drafted += drafts[k] != -1;
        const int64_t room = max_tokens_M[row] - num_tokens_M[row], found = accepted + (targets[accepted] >= 0);
        const int64_t emitted = max(min(found, room), 0);
        for (int64_t q = 0; q < width; q++) outcome[3 + q] = q < emitted ? targets[q] : -1;
        memcpy(tokens_ML + row * L + num_tokens_M[row], outcome + 3, emitted * sizeof(int32_t));
        num_tokens_M[row] += emitted;
        num_emitted_R[r] = outcome[0] = emitted;
        outcome[1] = min(accepted, emitted);
        outcome[2] = drafted;
    }
    return 0;
}
