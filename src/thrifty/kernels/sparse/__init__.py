"""Products with sparse matrices that take less time than dense ones: SpMM and SDDMM.

sparsity_pattern.py     which places are kept
csr_matrix.py           single weights anywhere
block_sparse_matrix.py  whole blocks of weights
sparse_linear.py        a linear layer of a sparse weight, with gradients
sparse_breakeven.py     from which density on a layer's products beat dense ones on this machine
"""
