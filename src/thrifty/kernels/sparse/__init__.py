"""Sparse matmuls that are faster than dense matmuls: SpMM (sparse x dense), SDDMM (sampled dense x dense), SpGEMM
(sparse x sparse).

sparsity_pattern.py     kept positions of a matrix
csr_matrix.py           single weights at any position
block_sparse_matrix.py  whole blocks of weights
sparse_linear.py        a linear layer with a sparse weight and gradients
spgemm.py               sparse x sparse, by rows and by outer products
sparse_breakeven.py     density below which sparse matmuls are faster than dense on this machine
"""
