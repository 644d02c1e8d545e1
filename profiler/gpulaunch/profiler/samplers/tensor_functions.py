"""Names of functions, and of methods of tensors, that only give a result, which depends on their arguments alone."""

from __future__ import annotations

from typing import Final

_PACKAGES: Final = frozenset({"torch", "numpy", "math"})
_DO_MORE: Final = frozenset({"distributed", "cuda", "random"})
NUMBERS: Final = frozenset(
    {
        *("arange", "linspace", "logspace", "eye", "tril_indices", "triu_indices", "indices", "fftfreq", "rfftfreq"),
        *("hann_window", "hamming_window", "blackman_window", "generate_square_subsequent_mask"),
    }
)
"""Functions of torch and NumPy that make something of numbers, which no parameter and no module can be."""
ROOM: Final = frozenset({"zeros", "ones", "full", "zeros_like", "ones_like", "full_like"})
"""Functions that make room, which takes little time, and which programs fill."""
COMPUTE: Final = frozenset(
    {
        *("tril", "triu", "exp", "log", "log2", "log10", "sqrt", "rsqrt", "pow", "sin", "cos", "tanh", "sigmoid"),
        *("relu", "softmax"),
        *("abs", "square", "clamp", "clip", "sum", "mean", "prod", "cumsum", "cumprod", "amax", "amin", "norm"),
        *("normalize", "std", "matmul", "mm", "bmm", "outer", "einsum", "cdist", "inverse", "inv", "pinv", "svd"),
        *("eigh", "matrix_power", "dot", "cat", "stack", "concatenate", "meshgrid", "where", "maximum", "minimum"),
        *("masked_fill", "repeat_interleave", "kron", "diag", "diag_embed", "repeat", "tile", "roll", "flip"),
        *("one_hot", "pad", "interpolate", "remainder", "floor", "ceil", "round", "add", "sub", "mul", "div", "neg"),
        *("clamp_min", "clamp_max", "matrix_norm", "vector_norm", "svdvals", "eigvalsh", "qr", "cholesky", "solve"),
        *("det", "slogdet", "logdet", "logsumexp", "log1p", "expm1", "sign", "sort", "argsort", "bincount", "nonzero"),
        *("sparse_coo_tensor", "coalesce", "to_sparse", "to_dense", "index_select", "fft2", "irfft", "ifft"),
        *("reciprocal", "tensor", "array", "logical_not", "logical_and", "logical_or", "clone", "fft", "rfft"),
    }
)
"""Functions, and methods of a tensor, whose result is new, and depends on their arguments alone."""
FILLS: Final = frozenset(
    {
        *("index_add_", "scatter_add_", "scatter_", "index_fill_", "masked_fill_", "fill_diagonal_", "fill_"),
        *("add_", "sub_", "mul_", "div_", "clamp_", "pow_", "sqrt_", "rsqrt_", "reciprocal_"),
    }
)
"""Methods that change a tensor, by their arguments alone, and nothing else."""
VIEWS: Final = frozenset(
    {
        *("to", "float", "half", "double", "bfloat16", "long", "int", "bool", "type_as", "contiguous", "cpu", "cuda"),
        *("t", "view", "reshape", "expand", "expand_as", "unsqueeze", "squeeze", "transpose", "permute", "flatten"),
        *("astype", "from_numpy", "as_tensor", "asarray", "diagonal", "chunk", "split", "unfold", "narrow"),
        *("indices", "values"),
    }
)
"""Those whose result may share its memory with what it is made of."""
SHAPES: Final = frozenset({"size", "dim", "numel"})
"""Methods that give such."""
SCALARS: Final = frozenset({"int", "float", "min", "max", "abs", "round", "range"})
"""Builtin functions of numbers."""
OF_A_TENSOR: Final = frozenset({"shape", "device", "dtype", "ndim"})
"""Attributes that its values have no part in."""
TRANSPOSED: Final = frozenset({"T", "mT"})


def only_computes(module: str) -> bool:
    """Whether a module, or what is imported from it, as `torch.nn.functional`, is of a package that computes."""
    package, *parts = module.split(".")
    return package in _PACKAGES and _DO_MORE.isdisjoint(parts)
