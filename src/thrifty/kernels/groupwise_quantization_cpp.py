"""C++ source of compiled groupwise quantization, one line at a time. Results equal `groupwise_quantization.py` bit for
bit.

A line is in the cache when it is quantized, because its extremes were just computed. Elements are passed as their bits:
int32_t for float32, int16_t for bfloat16. The compiler must not fuse a product and a sum (FMA), because that would
round once instead of twice.
"""

SOURCE = r"""
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

typedef uint32_t word;

template <typename T, int BITS, bool ZEROS>
struct Kind {
    typedef T Number;
    static const int bits = BITS, parts = 8 / BITS, top = (1 << BITS) - 1 - ZEROS;
    static const bool zeros = ZEROS;
};

// selects a compile-time variant for run-time arguments
template <typename F>
static void of_kind(int64_t size, int64_t bits, int64_t zeros, F f) {
#define KIND(T, B, Z) if (size == sizeof(T) && bits == B && zeros == Z) f(Kind<T, B, Z>{});
#define BOTH(T, B) KIND(T, B, false) KIND(T, B, true)
#define EACH(T) BOTH(T, 2) BOTH(T, 4) BOTH(T, 8)
    EACH(int32_t) EACH(int16_t)
}

static inline word bits_of(float x) {
    word bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float to_float(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float to_float(int16_t bits) { return to_float((int32_t)((word)(uint16_t)bits << 16)); }

// stores a float32 unchanged, or rounded stochastically to bfloat16
static inline void put(int32_t& to, float x, word chance) { to = bits_of(x); }
static inline void put(int16_t& to, float x, word chance) { to = bits_of(x) + chance >> 16; }

static inline word mixed(word w) {
    w = (w ^ w >> 16) * 0x21F0AAAD;
    w = (w ^ w >> 15) * 0x735A2D97;
    return w ^ w >> 15;
}

static inline word word_of_line(int64_t line, word seed) { return mixed(mixed((word)line * 0x9E3779B9) + seed); }

// maps float bits to integers in the order of the floats (NaN beyond infinity), and back
template <typename T>
static inline T ordered(T bits) {
    return bits ^ (bits >> (8 * sizeof(T) - 1) & std::numeric_limits<T>::max());
}

template <typename K, typename T>
static inline void extremes_of_line(const T* numbers, int64_t width, float& low, float& high) {
    const T most = std::numeric_limits<T>::max(), fewest = std::numeric_limits<T>::min();
    T lowest = most, highest = fewest;
    for (int64_t j = 0; j < width; j++) {
        T place = ordered(numbers[j]), out = K::zeros ? -(T)((numbers[j] & most) == 0) : 0;
        lowest = std::min<T>(lowest, place & ~out | most & out);
        highest = std::max<T>(highest, place & ~out | fewest & out);
    }
    if (lowest > highest) lowest = highest = 0;
    low = to_float(ordered(lowest));
    high = to_float(ordered(highest));
}

template <typename K>
static inline void outward(float low, float high, float& least, float& step) {
    const word dropped = 0xFFFF;
    least = to_float((int32_t)((low < 0 ? bits_of(low) + dropped : bits_of(low)) & ~dropped));
    step = to_float((int32_t)(bits_of((high - least) / K::top) + dropped & ~dropped));
}

template <typename K, typename T>
static inline void quantise_line(const T* numbers, int64_t width, float least, float step, word by_line,
                                 const word* by_place, uint8_t* codes) {
    const int64_t lanes = width / K::parts;
    const float scale = step > 0x1p-111f ? 0x1p16f / step : 0;
    for (int64_t j = 0; j < lanes; j++) {
        word packed = 0, chance = 0;
        for (int part = 0; part < K::parts; part++) {
            float x = to_float(numbers[part * lanes + j]);
            bool is_zero = K::zeros && x == 0;
            if (is_zero) x = least;
            chance = part % 2 ? chance >> 16 : mixed(by_line ^ by_place[part / 2 * lanes + j]);
            int code = (int)((x - least) * scale) + (int)(chance & 0xFFFF) >> 16;
            code = std::min(std::max(code, 0), K::top);
            if (K::zeros) code = is_zero ? 0 : code + 1;
            packed |= (word)code << K::bits * part;
        }
        codes[j] = packed;
    }
}

template <typename K, typename T>
static inline void decode_line(const uint8_t* codes, int64_t width, float least, float step, word by_line,
                               const word* by_place, T* numbers) {
    const int64_t lanes = width / K::parts;
    for (int64_t j = 0; j < lanes; j++) {
        word chance = 0;
        for (int part = 0; part < K::parts; part++) {
            int code = codes[j] >> K::bits * part & (1 << K::bits) - 1;
            float x = (float)(code - K::zeros) * step + least;
            if (K::zeros && code == 0) x = 0;
            if (sizeof(T) == 2) chance = part % 2 ? chance >> 16 : mixed(by_line ^ by_place[part / 2 * lanes + j]);
            put(numbers[part * lanes + j], x, chance & 0xFFFF);
        }
    }
}

// quantizes lines, one group each; writes bytes, and the upper halves of minimums and steps
extern "C" void encode(int64_t size, int64_t bits, int64_t zeros, const void* numbers, int64_t width, int64_t seed,
                       const word* by_place, int64_t line, uint8_t* codes, uint16_t* least, uint16_t* step,
                       int64_t first, int64_t last) {
    of_kind(size, bits, zeros, [&](auto kind) {
        typedef decltype(kind) K;
        for (int64_t i = first; i < last; i++) {
            auto from = (const typename K::Number*)numbers + i * width;
            float low, high, from_here, by;
            extremes_of_line<K>(from, width, low, high);
            outward<K>(low, high, from_here, by);
            quantise_line<K>(from, width, from_here, by, word_of_line(line + i, seed), by_place,
                             codes + i * (width / K::parts));
            least[i] = bits_of(from_here) >> 16;
            step[i] = bits_of(by) >> 16;
        }
    });
}

extern "C" void extremes(int64_t size, int64_t zeros, const void* numbers, int64_t width, float* low, float* high,
                         int64_t first, int64_t last) {
    of_kind(size, 8, zeros, [&](auto kind) {
        typedef decltype(kind) K;
        for (int64_t i = first; i < last; i++)
            extremes_of_line<K>((const typename K::Number*)numbers + i * width, width, low[i], high[i]);
    });
}

extern "C" void quantise(int64_t size, int64_t bits, int64_t zeros, const void* numbers, int64_t width, int64_t seed,
                         const word* by_place, int64_t line, uint8_t* codes, const float* least, const float* step,
                         int64_t first, int64_t last) {
    of_kind(size, bits, zeros, [&](auto kind) {
        typedef decltype(kind) K;
        for (int64_t i = first; i < last; i++)
            quantise_line<K>((const typename K::Number*)numbers + i * width, width, least[i], step[i],
                             word_of_line(line + i, seed), by_place, codes + i * (width / K::parts));
    });
}

extern "C" void decode(int64_t size, int64_t bits, int64_t zeros, void* numbers, int64_t width, int64_t seed,
                       const word* by_place, int64_t line, const uint8_t* codes, const float* least, const float* step,
                       int64_t first, int64_t last) {
    of_kind(size, bits, zeros, [&](auto kind) {
        typedef decltype(kind) K;
        for (int64_t i = first; i < last; i++)
            decode_line<K>(codes + i * (width / K::parts), width, least[i], step[i],
                           word_of_line(line + i, seed + 1), by_place, (typename K::Number*)numbers + i * width);
    });
}

template <typename F>
static void of_size(int64_t size, F f) {
    if (size == 1) f(int8_t{});
    if (size == 2) f(int16_t{});
    if (size == 4) f(int32_t{});
}

// packs one bit per element, set if the element equals `high` (as bits); floating-point zero has two bit patterns
extern "C" void encode_mask(int64_t size, const void* numbers, int64_t width, int64_t high, uint8_t* codes,
                            int64_t first, int64_t last) {
    const int64_t lanes = width / 8;
    of_size(size, [&](auto zero) {
        typedef decltype(zero) T;
        const T most = std::numeric_limits<T>::max(), seen = size > 1 && ((T)high & most) == 0 ? most : (T)-1;
        const T wanted = (T)high & seen;
        for (int64_t i = first; i < last; i++)
            for (int64_t j = 0; j < lanes; j++) {
                uint8_t packed = 0;
                for (int part = 0; part < 8; part++)
                    packed |= (((const T*)numbers)[i * width + part * lanes + j] & seen) == wanted ? 1 << part : 0;
                codes[i * lanes + j] = packed;
            }
    });
}

extern "C" void decode_mask(int64_t size, void* numbers, int64_t width, int64_t low, int64_t high,
                            const uint8_t* codes, int64_t first, int64_t last) {
    const int64_t lanes = width / 8;
    of_size(size, [&](auto zero) {
        typedef decltype(zero) T;
        for (int64_t i = first; i < last; i++)
            for (int part = 0; part < 8; part++)
                for (int64_t j = 0; j < lanes; j++)
                    ((T*)numbers)[i * width + part * lanes + j] = codes[i * lanes + j] >> part & 1 ? high : low;
    });
}
"""
