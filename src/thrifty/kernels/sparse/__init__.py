"""Products with sparse matrices that take less time than dense ones: SpMM, SDDMM and SpGEMM.

sparsity_pattern.py     which places are kept
csr_matrix.py           single weights anywhere
block_sparse_matrix.py  whole blocks of weights
sparse_linear.py        a linear layer of a sparse weight, with gradients
spgemm.py               sparse times sparse, by rows and by outer products
sparse_breakeven.py     from which density on a layer's products beat dense ones on this machine
"""
