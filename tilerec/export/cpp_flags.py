"""`cpp_flags`: compiler options of a C++ program that runs packages."""

from __future__ import annotations

from pathlib import Path

import torch

from tilerec.export.torch_library import ops_path


def cpp_flags() -> list[str]:
    """Return the options that compile and link a program which includes `tilerec/export/cpp/model.h`, with this torch.

    Example: `g++ -O2 SOURCE $(python -c "from tilerec.export import cpp_flags; print(*cpp_flags())")`

    Raises:
        ConfigError: this installation has no `libtilerec_ops.so`.
    """
    ops, home = ops_path().parent, Path(torch.__file__).parent
    include, lib = home / "include", home / "lib"
    return [
        "-std=c++20", f"-I{Path(__file__).parent / 'cpp'}", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-L{ops}", f"-L{lib}", "-ltilerec_ops",
        "-ltorch", "-ltorch_cpu", "-lc10", "-pthread", f"-Wl,-rpath,{ops}", f"-Wl,-rpath,{lib}",
    ]  # fmt: skip
