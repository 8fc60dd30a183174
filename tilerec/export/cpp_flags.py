"""`cpp_flags`: compiler options of a C++ program that runs packages."""

from __future__ import annotations

from pathlib import Path

import torch

from tilerec.errors import ConfigError


def ops_library() -> Path:
    """Return the path of `libtilerec_ops.so`.

    Raises:
        ConfigError: this installation has none.
    """
    path = Path(__file__).parent / "lib" / "libtilerec_ops.so"
    if not path.is_file():
        raise ConfigError(
            f"libtilerec_ops.so: got no {path}; expected the library of ops for C++ programs. Install a wheel that has "
            "it, or build it in a checkout with `make native`."
        )
    return path


def cpp_flags() -> list[str]:
    """Return the options that compile and link a program which includes `tilerec/export/cpp/model.h`, with this torch.

    Example: `g++ -O2 SOURCE $(python -c "from tilerec.export import cpp_flags; print(*cpp_flags())")`

    Raises:
        ConfigError: this installation has no `libtilerec_ops.so`.
    """
    ops, home = ops_library().parent, Path(torch.__file__).parent
    include, lib = home / "include", home / "lib"
    return [
        "-std=c++20", f"-I{Path(__file__).parent / 'cpp'}", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-L{ops}", f"-L{lib}", "-ltilerec_ops",
        "-ltorch", "-ltorch_cpu", "-lc10", "-pthread", f"-Wl,-rpath,{ops}", f"-Wl,-rpath,{lib}",
    ]  # fmt: skip
