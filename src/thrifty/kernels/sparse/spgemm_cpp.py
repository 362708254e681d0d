"""C++ source of compiled SpGEMM. Each thread computes a range of rows of the result."""

SOURCE = r"""
#include <algorithm>
#include <cstdint>
#include <vector>

struct Row {  // sums of one row of the result, by column, and the row's nonzero columns
    std::vector<double> sums;
    std::vector<char> is_there;
    std::vector<int64_t> found;
    bool is_full = false;
    int64_t count = 0;
    explicit Row(int64_t n) : sums(n), is_there(n), found(n + 1) {}
    void expect(int64_t numbers) {  // in a full row, scanning all columns is faster than sorting the nonzero columns
        is_full = numbers * 16 > (int64_t)sums.size();
        count = 0;
    }
    void add(int64_t column, double value) {
        sums[column] += value;
        if (!is_full) {
            found[count] = column;
            count += !is_there[column];
        }
        is_there[column] = 1;
    }
    int64_t leave(int64_t* columns, double* values) {
        if (is_full)
            for (int64_t column = 0; column < (int64_t)sums.size(); column++) {
                found[count] = column;
                count += is_there[column];
            }
        else
            std::sort(found.begin(), found.begin() + count);
        for (int64_t at = 0; at < count; at++) {
            int64_t column = found[at];
            columns[at] = column;
            values[at] = sums[column];
            sums[column] = 0.0;
            is_there[column] = 0;
        }
        return count;
    }
};

// an uncaught exception in a thread would end the process, so a row without memory gets the count -1 instead
static void no_memory(int64_t* counts, int64_t first, int64_t last) { std::fill(counts + first, counts + last, -1); }

// Gustavson: for each row of A, sums the rows of B that its elements refer to. `rooms` is the start of each row's
// output, with space for all its partial products; `counts` is the number of written elements
extern "C" void spgemm_rows(const int64_t* a_starts, const int64_t* a_columns, const double* a_values,
                            const int64_t* b_starts, const int64_t* b_columns, const double* b_values, int64_t n,
                            const int64_t* rooms, int64_t* columns, double* values, int64_t* counts, int64_t first,
                            int64_t last) try {
    Row row(n);
    for (int64_t i = first; i < last; i++) {
        row.expect(rooms[i + 1] - rooms[i]);
        for (int64_t p = a_starts[i]; p < a_starts[i + 1]; p++)
            for (int64_t q = b_starts[a_columns[p]]; q < b_starts[a_columns[p] + 1]; q++)
                row.add(b_columns[q], a_values[p] * b_values[q]);
        counts[i] = row.leave(columns + rooms[i], values + rooms[i]);
    }
} catch (...) {
    no_memory(counts, first, last);
}

// Outer products: multiplies each column of A by the row of B with the same index, and distributes to result rows;
// then the elements of each row are merged. A is stored by columns
extern "C" void spgemm_outer(const int64_t* a_starts, const int64_t* a_rows, const double* a_values,
                             const int64_t* b_starts, const int64_t* b_columns, const double* b_values, int64_t k,
                             int64_t n, const int64_t* rooms, int64_t* columns, double* values, int64_t* counts,
                             int64_t first, int64_t last) try {
    std::vector<int64_t> next(rooms + first, rooms + last);
    for (int64_t c = 0; c < k; c++) {
        const int64_t* end = a_rows + a_starts[c + 1];
        for (const int64_t* at = std::lower_bound(a_rows + a_starts[c], end, first); at < end && *at < last; at++)
            for (int64_t q = b_starts[c]; q < b_starts[c + 1]; q++) {
                int64_t place = next[*at - first]++;
                columns[place] = b_columns[q];
                values[place] = a_values[at - a_rows] * b_values[q];
            }
    }
    Row row(n);
    for (int64_t i = first; i < last; i++) {
        row.expect(rooms[i + 1] - rooms[i]);
        for (int64_t p = rooms[i]; p < next[i - first]; p++) row.add(columns[p], values[p]);
        counts[i] = row.leave(columns + rooms[i], values + rooms[i]);
    }
} catch (...) {
    no_memory(counts, first, last);
}

// moves the written elements together, one row after the other
extern "C" void spgemm_close_up(const int64_t* rooms, const int64_t* columns, const double* values,
                                const int64_t* starts, int64_t* to_columns, double* to_values, int64_t first,
                                int64_t last) {
    for (int64_t i = first; i < last; i++) {
        int64_t count = starts[i + 1] - starts[i];
        std::copy_n(columns + rooms[i], count, to_columns + starts[i]);
        std::copy_n(values + rooms[i], count, to_values + starts[i]);
    }
}
"""
