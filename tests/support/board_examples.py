"""Runs and results that tests of the board show."""

TOKEN = "a-token-of-the-tests-0123456789"  # noqa: S105
LION = {
    "name": "optimizers.lion",
    "stage": "precondition",
    "numerics": "different",
    "card": "Lion (Chen et al. 2023): the sign of a momentum.\n\n"
    "More is said in a line of its own.\n\nPaper     Chen et al. 2023.\nPromise   half of AdamW's state,\n"
    "          and no second moment.",
    "settings": [{"name": "lr", "type": "float, at least 0", "default": 1e-4}],
}
