"""Sparse matrix products that are faster than dense ones: SpMM, SDDMM and SpGEMM.

sparsity_pattern.py     kept positions of a matrix
csr_matrix.py           single weights at any position
block_sparse_matrix.py  whole blocks of weights
sparse_linear.py        a linear layer with a sparse weight and gradients
spgemm.py               sparse times sparse, by rows and by outer products
sparse_breakeven.py     the density below which sparse products are faster than dense ones on this machine
"""
