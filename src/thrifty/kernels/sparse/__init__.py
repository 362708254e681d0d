"""Products with sparse matrices that take less time than dense ones: SpMM, SDDMM and SpGEMM.

patterns.py   which places are kept
csr.py        single weights anywhere           blocks.py   whole blocks of weights
products.py   the two with gradients, and a linear layer of them
spgemm.py     sparse times sparse, by rows and by outer products
crossover.py  from which density on a layer's products beat dense ones on this machine
"""
