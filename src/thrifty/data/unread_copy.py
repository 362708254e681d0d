"""Copies of datasets that are read in the place of the originals.

Many datasets open a file at their first read. Forked worker processes of an opened dataset share the position in this
file, so they return wrong examples, and an opened dataset cannot be sent to other processes. So this process reads a
copy, and the original stays unread.
"""

import copy
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

SHARED = (Tensor, nn.Module, ModuleType, type)
"""Types whose objects a copy shares with the original."""
PACKAGES = ("datasets", "numpy", "pandas", "pyarrow", "tokenizers", "transformers")
"""Packages whose objects are shared too, because several processes can read them, and copies may be expensive."""


def unread_copy(dataset: Any, copies: dict[int, Any] | None = None) -> Any:
    """Return a copy of a dataset with attributes of its own. Objects in its attributes are copied too, but not tensors,
    arrays and containers of examples. Return the dataset itself if it has no attributes or cannot be copied.

    `copies` holds earlier copies by the identity of the original, for example of a dataset with several subsets.
    """
    copies = {} if copies is None else copies
    if id(dataset) in copies:
        return copies[id(dataset)]
    copies[id(dataset)] = dataset
    package = type(dataset).__module__.partition(".")[0]
    if isinstance(dataset, SHARED) or package in PACKAGES or not hasattr(dataset, "__dict__"):
        return dataset
    try:
        copied = copy.copy(dataset)
        attributes = vars(copied)
    except Exception:  # such as an open file, which the user's code opened before
        return dataset
    if copied is dataset or attributes is vars(dataset):
        return dataset
    copies[id(dataset)] = copied
    for name, value in attributes.items():
        if isinstance(value, list | tuple) and value and isinstance(value[0], Dataset):  # such as ConcatDataset's
            attributes[name] = [unread_copy(each, copies) for each in value]
        else:
            attributes[name] = unread_copy(value, copies)
    return copied
