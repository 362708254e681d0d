"""C++ source of compiled sparse matmuls: plain loops over ranges of rows or tiles, one thread per range.

Tokens are processed in tiles that fit a core's cache. For single weights (`csr_…`) a tile is transposed, so that one
vector contains one input of 16 tokens. For blocks (`block_…`) a tile is cut into panels of 16 inputs. The order of
additions depends only on the tiles, never on the number of threads.
"""

SOURCE = r"""
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

typedef float vec __attribute__((vector_size(64)));
typedef float at_any __attribute__((vector_size(64), aligned(4)));
static const int64_t L = 16;

static inline vec load(const float* p) { return *(const at_any*)p; }
static inline void store(float* p, vec v) { *(at_any*)p = v; }

#define TURN(s, low, high)                                              \
    for (int i = 0; i < 16; i++)                                        \
        if (!(i & s)) {                                                 \
            vec a = r[i], b = r[i + s];                                 \
            r[i] = __builtin_shufflevector(a, b, low);                  \
            r[i + s] = __builtin_shufflevector(a, b, high);             \
        }
#define LIST(...) __VA_ARGS__

static inline void turn(vec* r) {  // transposes a 16 x 16 tile
    TURN(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
         LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    TURN(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
         LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    TURN(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
         LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    TURN(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
         LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
}

// transposes `from` (rows x columns) into `to` (columns x rows); missing rows up to `width` are zero
static void turned(const float* from, int64_t rows, int64_t columns, int64_t stride, float* to, int64_t width) {
    for (int64_t j = 0; j < columns; j += L)
        for (int64_t t = 0; t < width; t += L) {
            int64_t high = std::max<int64_t>(0, std::min(L, rows - t)), wide = std::min(L, columns - j);
            vec r[16] = {};
            if (high == L && wide == L)
                for (int i = 0; i < 16; i++) r[i] = load(from + (t + i) * stride + j);
            else
                for (int64_t i = 0; i < high; i++)
                    std::memcpy(&r[i], from + (t + i) * stride + j, wide * sizeof(float));
            turn(r);
            for (int64_t i = 0; i < wide; i++) store(to + (j + i) * width + t, r[i]);
        }
}

template <int V>
static void csr_rows(const int64_t* starts, const int32_t* columns, const float* values, const float* bias,
                     const float* tile, float* y, int64_t m, int64_t tokens) {
    const int64_t width = V * L;
    std::vector<float> group(L * width);
    for (int64_t r0 = 0; r0 < m; r0 += L) {
        int64_t high = std::min(L, m - r0);
        for (int64_t i = 0; i < high; i++) {
            vec sum[V];
            for (int v = 0; v < V; v++) sum[v] = vec{} + (bias ? bias[r0 + i] : 0.0f);
            for (int64_t p = starts[r0 + i]; p < starts[r0 + i + 1]; p++) {
                const float* x = tile + columns[p] * width;
                for (int v = 0; v < V; v++) sum[v] += values[p] * load(x + v * L);
            }
            for (int v = 0; v < V; v++) store(&group[i * width + v * L], sum[v]);
        }
        for (int64_t t = 0; t < tokens; t += L) {
            vec r[16] = {};
            for (int64_t i = 0; i < high; i++) r[i] = load(&group[i * width + t]);
            turn(r);
            for (int64_t i = 0; i < std::min(L, tokens - t); i++)
                if (high == L) store(y + (t + i) * m + r0, r[i]);
                else std::memcpy(y + (t + i) * m + r0, &r[i], high * sizeof(float));
        }
    }
}

// y (tokens, m) = x (tokens, k) times a transposed sparse (m, k), for tiles [first, last) of 16 * vectors tokens
extern "C" void csr_spmm(const int64_t* starts, const int32_t* columns, const float* values, const float* bias,
                         const float* x, float* y, int64_t m, int64_t k, int64_t tokens, int64_t vectors,
                         int64_t first, int64_t last) {
    const int64_t width = vectors * L;
    std::vector<float> tile(k * width);
    for (int64_t at = first * width; at < std::min(last * width, tokens); at += width) {
        int64_t here = std::min(width, tokens - at);
        turned(x + at * k, here, k, k, tile.data(), width);
        auto rows = vectors == 8 ? csr_rows<8> : vectors == 4 ? csr_rows<4> : vectors == 2 ? csr_rows<2> : csr_rows<1>;
        rows(starts, columns, values, bias, tile.data(), y + at * m, m, here);
    }
}

extern "C" void csr_turn(const float* x, float* tiles, int64_t k, int64_t tokens, int64_t width, int64_t first,
                         int64_t last) {
    for (int64_t t = first; t < last; t++)
        turned(x + t * width * k, std::min(width, tokens - t * width), k, k, tiles + t * k * width, width);
}

static inline float total(vec v) {
    float n[16];
    std::memcpy(n, &v, sizeof n);
    for (int s = 8; s; s >>= 1)
        for (int i = 0; i < s; i++) n[i] += n[i + s];
    return n[0];
}

// out (nnz): leftᵀ right at each kept position of rows [first, last); left (tokens, m) and right (tokens, k) are passed
// transposed
extern "C" void csr_sddmm(const int64_t* starts, const int32_t* columns, const float* left, const float* right,
                          float* out, int64_t m, int64_t k, int64_t tiles, int64_t first, int64_t last) {
    const int V = 8;
    std::fill(out + starts[first], out + starts[last], 0.0f);
    for (int64_t t = 0; t < tiles; t++)
        for (int64_t i = first; i < last; i++) {
            vec g[V];
            for (int v = 0; v < V; v++) g[v] = load(left + (t * m + i) * V * L + v * L);
            for (int64_t p = starts[i]; p < starts[i + 1]; p++) {
                const float* x = right + (t * k + columns[p]) * V * L;
                vec a = g[0] * load(x), b = g[1] * load(x + L);
                for (int v = 2; v < V; v += 2) {
                    a += g[v] * load(x + v * L);
                    b += g[v + 1] * load(x + v * L + L);
                }
                out[p] += total(a + b);
            }
        }
}

// cuts x into panels of 16 columns and `width` consecutive tokens, with zeros after the last token
extern "C" void block_panels(const float* x, float* panels, int64_t k, int64_t tokens, int64_t width, int64_t first,
                             int64_t last) {
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t t = 0; t < width; t++)
            for (int64_t j = 0; j < k / L; j++) {
                int64_t token = tile * width + t;
                store(panels + ((tile * (k / L) + j) * width + t) * L,
                      token < tokens ? load(x + token * k + j * L) : vec{});
            }
}

// like csr_spmm, with blocks instead of single weights; `values` has 16 inputs by 16 outputs for each kept block
extern "C" void block_spmm(const int64_t* starts, const int32_t* columns, const float* values, const float* bias,
                           const float* x, float* y, int64_t m, int64_t k, int64_t tokens, int64_t width,
                           int64_t first, int64_t last) {
    std::vector<float> panels(k * width);
    for (int64_t tile = first; tile < last; tile++) {
        int64_t at = tile * width, here = std::min(width, tokens - at);
        block_panels(x + at * k, panels.data(), k, here, width, 0, 1);
        for (int64_t i = 0; i < m / L; i++)
            for (int64_t t = 0; t < here; t += L) {
                vec sum[16];
                for (int s = 0; s < 16; s++) sum[s] = bias ? load(bias + i * L) : vec{};
                for (int64_t p = starts[i]; p < starts[i + 1]; p++) {
                    const float* from = panels.data() + (columns[p] * width + t) * L;
                    const float* block = values + p * L * L;
                    for (int j = 0; j < 16; j++) {
                        vec row = load(block + j * L);
                        for (int s = 0; s < 16; s++) sum[s] += from[s * L + j] * row;
                    }
                }
                for (int64_t s = 0; s < std::min(L, here - t); s++) store(y + (at + t + s) * m + i * L, sum[s]);
            }
    }
}

// like csr_sddmm, for block rows [first, last); `out` has 16 outputs by 16 inputs for each kept block
extern "C" void block_sddmm(const int64_t* starts, const int32_t* columns, const float* left, const float* right,
                            float* out, int64_t m, int64_t k, int64_t width, int64_t tiles, int64_t first,
                            int64_t last) {
    std::fill(out + starts[first] * L * L, out + starts[last] * L * L, 0.0f);
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int64_t i = first; i < last; i++) {
            const float* g = left + (tile * (m / L) + i) * width * L;
            for (int64_t p = starts[i]; p < starts[i + 1]; p++) {
                const float* x = right + (tile * (k / L) + columns[p]) * width * L;
                vec sum[16];
                for (int s = 0; s < 16; s++) sum[s] = load(out + (p * L + s) * L);
                for (int64_t t = 0; t < width; t++) {
                    vec row = load(x + t * L);
                    for (int s = 0; s < 16; s++) sum[s] += g[t * L + s] * row;
                }
                for (int s = 0; s < 16; s++) store(out + (p * L + s) * L, sum[s]);
            }
        }
}
"""
