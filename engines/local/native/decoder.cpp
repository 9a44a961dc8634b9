// One forward of a llama-shaped decoder over a few tokens, on a CPU: the weights are read once, whatever the tokens.
//
//   tokens   rows of the batch, each with a slot of the pool to write and a page table to attend over
//   phase    a piece of a layer; its units are taken from a counter by whoever is free, a barrier ends it
//
// A token's result does not depend on the other tokens, bit for bit: each dot product sums over columns in one order,
// and attention is cut by a token's own length. No allocation and no system call within a step but those of waiting.
// Written with the vector extensions of GCC and Clang: AVX2, AVX-512 and NEON alike.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <sched.h>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() { std::atomic_signal_fence(std::memory_order_seq_cst); }
#endif

#if defined(__AVX512F__)
constexpr int W = 16; // floats of a vector
#else
constexpr int W = 8;
#endif
typedef float vec __attribute__((vector_size(W * 4)));
typedef float loose __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(W * 4)));
typedef float quad __attribute__((vector_size(16)));
typedef float loose4 __attribute__((vector_size(16), aligned(4), may_alias));

static inline vec load(const float *from) { return *reinterpret_cast<const loose *>(from); }
static inline quad load4(const float *from) { return *reinterpret_cast<const loose4 *>(from); }
static inline void store4(float *to, quad value) { *reinterpret_cast<loose4 *>(to) = value; }
static inline void store(float *to, vec value) { *reinterpret_cast<loose *>(to) = value; }
static inline vec all(float value) { return value - vec{}; }

// The lanes of a vector as four, then (0 + 1) + (2 + 3): one order, however many are summed at once.
static inline quad folded(vec value) {
  union {
    vec whole;
    quad part[W / 4];
  } u{value};
  for (int half = W / 8; half; half /= 2)
    for (int i = 0; i < half; i++) u.part[i] += u.part[i + half];
  return u.part[0];
}

static inline float sum(vec value) {
  const quad s = folded(value);
  return (s[0] + s[1]) + (s[2] + s[3]);
}

static inline quad sums(vec first, vec second, vec third, vec fourth) {
  const quad a = folded(first), b = folded(second), c = folded(third), d = folded(fourth);
  const quad ab = __builtin_shufflevector(a, b, 0, 4, 2, 6) + __builtin_shufflevector(a, b, 1, 5, 3, 7);
  const quad cd = __builtin_shufflevector(c, d, 0, 4, 2, 6) + __builtin_shufflevector(c, d, 1, 5, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// e^x for x <= 88 to 2 units in the last place; below -87 it is 0. Range reduction by ln 2, then a polynomial.
static inline vec exponential(vec x) {
  const vec lowest = all(-87.0f);
  const ivec tiny = x < lowest;
  x = tiny ? lowest : x;
  vec turns = x * all(1.44269504088896341f) + all(12582912.0f); // 1.5 * 2^23: rounds to an integer in the low bits
  const ivec power = (ivec)turns;
  turns -= all(12582912.0f);
  vec r = x - turns * all(0.693359375f);
  r = r + turns * all(2.12194440e-4f);
  vec p = all(1.9875691500e-4f);
  p = p * r + all(1.3981999507e-3f);
  p = p * r + all(8.3334519073e-3f);
  p = p * r + all(4.1665795894e-2f);
  p = p * r + all(1.6666665459e-1f);
  p = p * r + all(5.0000001201e-1f);
  p = p * r * r + r + all(1.0f);
  const vec scale = (vec)((power << 23) + (ivec)all(1.0f));
  const vec result = p * scale;
  return tiny ? vec{} : result;
}

extern "C" {
struct Matrix { // [rows, columns], row after row
  const float *data;
  const float *bias; // or null
  int64_t rows, columns;
};
struct Layer {
  const float *norm_in, *norm_mid;
  const float *norm_query, *norm_key; // of each head, or null
  Matrix query, key, value, out, gate, up, down;
  float *keys, *values; // the pool's, [slots, kv_heads, dim]
  int64_t window;       // how far back it attends; 0: to all
};
struct Model {
  int64_t layers, hidden, heads, kv_heads, dim, inner, block_size, most_tokens;
  float eps, scale;
  const Layer *layer;
  const float *embedding, *norm;
  Matrix head;
};
struct Step {
  int64_t tokens, kept;
  const int64_t *ids, *slots, *lengths; // [tokens]; lengths: K/V that the token attends to, its own included
  const int32_t *const *tables;         // [tokens] page tables
  const float *cosine, *sine;           // [tokens, dim]
  const int64_t *keep;                  // [kept] tokens whose logits are wanted
  float *logits;                        // [kept, vocabulary]
};
}

constexpr int SPAN = 512;       // positions of one attention unit at least
constexpr int MOST_SPANS = 32;  // of one token and head
constexpr int PIECE = 32;       // positions whose scores are held at once
constexpr int UNIT_ROWS = 24;   // of a matrix, in one unit
constexpr int TILE = 3;         // tokens of a tile: with four rows of weights it fills 16 registers
constexpr int SPINS = 4000;     // before a waiting thread lets others run

struct Target { // of products: [tokens, stride], from the matrix's row `origin` on
  float *to;
  int64_t stride, origin;
  bool add;

  float *at(int64_t token, int64_t row) const { return to + token * stride + row - origin; }
};

// Rows row ... row + R of `m` times T rows of `from`, from token `token` on.
template <int R, int T>
static inline void tile(const Matrix &m, int64_t row, const float *from, int token, const Target &target) {
  const float *weights = m.data + row * m.columns;
  vec total[R][T] = {};
  for (int64_t k = 0; k < m.columns; k += W) {
    vec w[R];
    for (int r = 0; r < R; r++) w[r] = load(weights + r * m.columns + k);
    for (int t = 0; t < T; t++) {
      const vec a = load(from + (token + t) * m.columns + k);
      for (int r = 0; r < R; r++) total[r][t] += w[r] * a;
    }
  }
  for (int t = 0; t < T; t++) {
    float *to = target.at(token + t, row);
    if constexpr (R == 1) {
      float value = sum(total[0][t]);
      if (m.bias) value += m.bias[row];
      *to = target.add ? *to + value : value;
    } else {
      for (int r = 0; r < R; r += 4) {
        quad value = sums(total[r][t], total[r + 1][t], total[r + 2][t], total[r + 3][t]);
        if (m.bias) value += load4(m.bias + row + r);
        store4(to + r, target.add ? load4(to + r) + value : value);
      }
    }
  }
}

// Rows first ... last of `m` times each of `tokens` rows of `from` -> target.
static void multiply(const Matrix &m, int64_t first, int64_t last, const float *from, int tokens, const Target &target) {
  int64_t row = first;
  if (tokens == 1)
    for (; row + 8 <= last; row += 8) tile<8, 1>(m, row, from, 0, target);
  for (; row + 4 <= last; row += 4) {
    int token = 0;
    for (; token + 3 <= tokens; token += 3) tile<4, 3>(m, row, from, token, target);
    if (tokens - token == 2) tile<4, 2>(m, row, from, token, target);
    if (tokens - token == 1) tile<4, 1>(m, row, from, token, target);
  }
  for (; row < last; row++)
    for (int token = 0; token < tokens; token++) tile<1, 1>(m, row, from, token, target);
}

static void normalize(const float *x, const float *weight, int64_t size, float eps, float *out) {
  vec squares = {};
  for (int64_t i = 0; i < size; i += W) squares += load(x + i) * load(x + i);
  const float rate = 1.0f / std::sqrt(sum(squares) / (float)size + eps);
  for (int64_t i = 0; i < size; i += W) store(out + i, load(weight + i) * (load(x + i) * all(rate)));
}

static void rotate(float *x, const float *cosine, const float *sine, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i + half] + a * sine[i + half];
  }
}

// Softmax over what was attended to so far: most logit, sum of e^(logit - most), weighted values.
struct Partial {
  float *most, *total, *out; // [G], [G], [G, dim]
};

// Positions first ... last (at most PIECE, in consecutive slots from `slot` on) for G queries of one K/V head.
template <int G>
static inline void attend_piece(const Model &m, const float *query, const float *keys, const float *values, int count,
                                int64_t stride, Partial to) {
  float scores[G][PIECE];
  for (int j = 0; j < count; j++) {
    vec sums[G] = {};
    for (int64_t d = 0; d < m.dim; d += W) {
      const vec k = load(keys + j * stride + d);
      for (int g = 0; g < G; g++) sums[g] += load(query + g * m.dim + d) * k;
    }
    for (int g = 0; g < G; g++) scores[g][j] = sum(sums[g]) * m.scale;
  }
  const int padded = (count + W - 1) / W * W;
  for (int g = 0; g < G; g++) {
    float most = to.most[g];
    for (int j = 0; j < count; j++) most = std::max(most, scores[g][j]);
    for (int j = count; j < padded; j++) scores[g][j] = -INFINITY;
    const float before = std::exp(to.most[g] - most); // of -inf - number: 0
    vec total = {};
    for (int j = 0; j < padded; j += W) {
      const vec weight = exponential(load(scores[g] + j) - all(most));
      store(scores[g] + j, weight);
      total += weight;
    }
    to.most[g] = most;
    to.total[g] = to.total[g] * before + sum(total);
    if (before != 1.0f)
      for (int64_t d = 0; d < m.dim; d += W) store(to.out + g * m.dim + d, load(to.out + g * m.dim + d) * all(before));
  }
  for (int j = 0; j < count; j += 4) {
    const int now = std::min(count - j, 4);
    for (int64_t d = 0; d < m.dim; d += W) {
      vec out[G];
      for (int g = 0; g < G; g++) out[g] = load(to.out + g * m.dim + d);
      for (int i = 0; i < now; i++) {
        const vec v = load(values + (j + i) * stride + d);
        for (int g = 0; g < G; g++) out[g] += all(scores[g][j + i]) * v;
      }
      for (int g = 0; g < G; g++) store(to.out + g * m.dim + d, out[g]);
    }
  }
}

template <int G>
static void attend_heads(const Model &m, const Layer &layer, int64_t head, const int32_t *table, int64_t first,
                         int64_t last, const float *query, Partial to) {
  const int64_t stride = m.kv_heads * m.dim;
  for (int g = 0; g < G; g++) to.most[g] = -INFINITY, to.total[g] = 0;
  std::memset(to.out, 0, sizeof(float) * G * m.dim);
  for (int64_t at = first; at < last;) {
    const int64_t inside = at % m.block_size;
    const int64_t slot = table[at / m.block_size] * m.block_size + inside;
    const int64_t count = std::min({last - at, m.block_size - inside, (int64_t)PIECE});
    const int64_t offset = slot * stride + head * m.dim;
    attend_piece<G>(m, query, layer.keys + offset, layer.values + offset, (int)count, stride, to);
    at += count;
  }
}

struct Decoder {
  Model m;
  std::vector<Layer> layers;
  int threads;
  std::vector<std::thread> workers;
  std::mutex lock;
  std::condition_variable wake;
  uint64_t round = 0;
  bool closing = false;
  const Step *step = nullptr;

  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  std::vector<Counter> counters;
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> sense{0};

  std::vector<float> hidden, normed, query, key, value, mixed, inner, part_most, part_total, part_out;

  Decoder(const Model &model, int threads)
      : m(model), layers(model.layer, model.layer + model.layers), threads(threads),
        counters(model.layers * 9 + 8) {
    m.layer = layers.data();
    const int64_t tokens = m.most_tokens, width = m.heads * m.dim, kv = m.kv_heads * m.dim;
    hidden.resize(tokens * m.hidden);
    normed.resize(tokens * m.hidden);
    query.resize(tokens * width);
    key.resize(tokens * kv);
    value.resize(tokens * kv);
    mixed.resize(tokens * width);
    inner.resize(tokens * m.inner);
    part_most.resize(tokens * m.heads * MOST_SPANS);
    part_total.resize(tokens * m.heads * MOST_SPANS);
    part_out.resize(tokens * width * MOST_SPANS);
    for (int i = 1; i < threads; i++) workers.emplace_back([this] { serve(); });
  }

  ~Decoder() {
    {
      std::lock_guard<std::mutex> held(lock);
      closing = true;
    }
    wake.notify_all();
    for (auto &worker : workers) worker.join();
  }

  void serve() {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> held(lock);
        wake.wait(held, [&] { return closing || round != seen; });
        if (closing) return;
        seen = round;
      }
      work(*step);
    }
  }

  void run(const Step &given) {
    for (auto &counter : counters) counter.next.store(0, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> held(lock);
      step = &given;
      round++;
    }
    if (threads > 1) wake.notify_all();
    work(given);
  }

  // Everybody has come here before anybody goes on; what was written before is seen after.
  void meet() {
    if (threads == 1) return;
    const int now = sense.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      sense.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; sense.load(std::memory_order_acquire) == now; spins++)
      if (spins < SPINS) relax();
      else sched_yield();
  }

  template <class Do> void each(int phase, int64_t units, Do work) {
    for (int64_t unit; (unit = counters[phase].next.fetch_add(1, std::memory_order_relaxed)) < units;) work(unit);
    meet();
  }

  // Units of rows of one matrix after another.
  template <class Do> void each_rows(int phase, std::initializer_list<const Matrix *> matrices, Do work) {
    int64_t units = 0;
    for (const Matrix *one : matrices) units += (one->rows + UNIT_ROWS - 1) / UNIT_ROWS;
    each(phase, units, [&](int64_t unit) {
      for (const Matrix *one : matrices) {
        const int64_t here = (one->rows + UNIT_ROWS - 1) / UNIT_ROWS;
        if (unit < here) return work(*one, unit * UNIT_ROWS, std::min((unit + 1) * UNIT_ROWS, one->rows));
        unit -= here;
      }
    });
  }

  static int64_t spans(int64_t length) { return std::min<int64_t>((length + SPAN - 1) / SPAN, MOST_SPANS); }

  void work(const Step &s) {
    const int tokens = (int)s.tokens;
    int phase = 0;
    each(phase++, tokens, [&](int64_t t) {
      std::memcpy(&hidden[t * m.hidden], m.embedding + s.ids[t] * m.hidden, sizeof(float) * m.hidden);
    });
    for (const Layer &layer : layers) {
      each(phase++, tokens, [&](int64_t t) {
        normalize(&hidden[t * m.hidden], layer.norm_in, m.hidden, m.eps, &normed[t * m.hidden]);
      });
      project(s, layer, phase);
      attend(s, layer, phase);
      each_rows(phase++, {&layer.out}, [&](const Matrix &w, int64_t first, int64_t last) {
        multiply(w, first, last, mixed.data(), tokens, {hidden.data(), m.hidden, 0, true});
      });
      each(phase++, tokens, [&](int64_t t) {
        normalize(&hidden[t * m.hidden], layer.norm_mid, m.hidden, m.eps, &normed[t * m.hidden]);
      });
      each_rows(phase++, {&layer.gate}, [&](const Matrix &, int64_t first, int64_t last) {
        gate(layer, first, last, tokens);
      });
      each_rows(phase++, {&layer.down}, [&](const Matrix &w, int64_t first, int64_t last) {
        multiply(w, first, last, inner.data(), tokens, {hidden.data(), m.hidden, 0, true});
      });
    }
    each(phase++, s.kept, [&](int64_t n) {
      normalize(&hidden[s.keep[n] * m.hidden], m.norm, m.hidden, m.eps, &normed[n * m.hidden]);
    });
    each_rows(phase++, {&m.head}, [&](const Matrix &w, int64_t first, int64_t last) {
      multiply(w, first, last, normed.data(), (int)s.kept, {s.logits, w.rows, 0, false});
    });
  }

  void project(const Step &s, const Layer &layer, int &phase) {
    const int64_t width = m.heads * m.dim, kv = m.kv_heads * m.dim;
    each_rows(phase++, {&layer.query, &layer.key, &layer.value}, [&](const Matrix &w, int64_t first, int64_t last) {
      float *to = &w == &layer.query ? query.data() : &w == &layer.key ? key.data() : value.data();
      multiply(w, first, last, normed.data(), (int)s.tokens, {to, w.rows, 0, false});
    });
    each(phase++, s.tokens, [&](int64_t t) {
      const float *cosine = s.cosine + t * m.dim, *sine = s.sine + t * m.dim;
      for (int64_t h = 0; h < m.heads; h++) head(&query[t * width + h * m.dim], layer.norm_query, cosine, sine);
      for (int64_t h = 0; h < m.kv_heads; h++) head(&key[t * kv + h * m.dim], layer.norm_key, cosine, sine);
      std::memcpy(layer.keys + s.slots[t] * kv, &key[t * kv], sizeof(float) * kv);
      std::memcpy(layer.values + s.slots[t] * kv, &value[t * kv], sizeof(float) * kv);
    });
  }

  void head(float *x, const float *norm, const float *cosine, const float *sine) {
    if (norm) normalize(x, norm, m.dim, m.eps, x);
    rotate(x, cosine, sine, m.dim);
  }

  // Units: token, K/V head, span of positions. The spans of a token are cut by its own length.
  void attend(const Step &s, const Layer &layer, int &phase) {
    const int64_t group = m.heads / m.kv_heads;
    int64_t widest = 1;
    for (int64_t t = 0; t < s.tokens; t++) widest = std::max(widest, spans(s.lengths[t]));
    each(phase++, s.tokens * m.kv_heads * widest, [&](int64_t unit) {
      const int64_t span = unit % widest, h = unit / widest % m.kv_heads, t = unit / widest / m.kv_heads;
      const int64_t length = s.lengths[t], count = spans(length);
      if (span >= count) return;
      const int64_t oldest = layer.window ? std::max<int64_t>(length - layer.window, 0) : 0;
      const int64_t first = std::max(length * span / count, oldest), last = length * (span + 1) / count;
      for (int64_t g = 0; g < group;) {
        const int64_t q = h * group + g, at = (t * m.heads + q) * MOST_SPANS + span;
        // partial results of a span lie side by side for the queries of a call
        float most[4], total[4];
        float out[4 * 256];
        const Partial to{most, total, out};
        const float *from = &query[(t * m.heads + q) * m.dim];
        const int64_t now = std::min<int64_t>(group - g, 4);
        if (now == 4) attend_heads<4>(m, layer, h, s.tables[t], first, last, from, to);
        else if (now == 3) attend_heads<3>(m, layer, h, s.tables[t], first, last, from, to);
        else if (now == 2) attend_heads<2>(m, layer, h, s.tables[t], first, last, from, to);
        else attend_heads<1>(m, layer, h, s.tables[t], first, last, from, to);
        for (int64_t i = 0; i < now; i++) {
          part_most[at + i * MOST_SPANS] = most[i];
          part_total[at + i * MOST_SPANS] = total[i];
          std::memcpy(&part_out[(at + i * MOST_SPANS) * m.dim], out + i * m.dim, sizeof(float) * m.dim);
        }
        g += now;
      }
    });
    each(phase++, s.tokens * m.heads, [&](int64_t unit) {
      const int64_t count = spans(s.lengths[unit / m.heads]), at = unit * MOST_SPANS;
      float *out = &mixed[unit * m.dim];
      float most = -INFINITY, total = 0;
      for (int64_t i = 0; i < count; i++) most = std::max(most, part_most[at + i]);
      std::memset(out, 0, sizeof(float) * m.dim);
      for (int64_t i = 0; i < count; i++) {
        const float rate = std::exp(part_most[at + i] - most);
        total += part_total[at + i] * rate;
        for (int64_t d = 0; d < m.dim; d += W)
          store(out + d, load(out + d) + load(&part_out[(at + i) * m.dim + d]) * all(rate));
      }
      for (int64_t d = 0; d < m.dim; d += W) store(out + d, load(out + d) / all(total));
    });
  }

  // Units of gate and up together: inner = silu(gate) * up.
  void gate(const Layer &layer, int64_t first, int64_t last, int tokens) {
    float ups[TILE * UNIT_ROWS];
    for (int token = 0; token < tokens; token += TILE) {
      const int now = std::min(tokens - token, TILE);
      const float *from = &normed[token * m.hidden];
      float *to = &inner[token * m.inner];
      multiply(layer.gate, first, last, from, now, {to, m.inner, 0, false});
      multiply(layer.up, first, last, from, now, {ups, UNIT_ROWS, first, false});
      for (int t = 0; t < now; t++)
        for (int64_t row = first; row < last; row++) {
          float &g = to[t * m.inner + row];
          g = g / (1.0f + std::exp(-g)) * ups[t * UNIT_ROWS + row - first];
        }
    }
  }
};

extern "C" {
void *decoder_new(const Model *model, int threads) { return new Decoder(*model, threads); }
void decoder_run(void *decoder, const Step *step) { static_cast<Decoder *>(decoder)->run(*step); }
void decoder_free(void *decoder) { delete static_cast<Decoder *>(decoder); }
int64_t vector_width() { return W; }
}
