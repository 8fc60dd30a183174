from __future__ import annotations

import numpy as np

from tilerec.data.transform import signed_log


def test_signed_log_is_odd_keeps_zero_and_is_log1p_above_it() -> None:
    values = np.array([0.0, 1.0, np.e - 1, 1e6, 2.0**53])
    out = signed_log(values)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, np.log1p(values), rtol=1e-6)
    np.testing.assert_array_equal(signed_log(-values), -out)


def test_integers_of_any_shape_are_taken() -> None:
    assert signed_log(np.array([[-2, 3], [0, 0]], np.int64)).shape == (2, 2)
    assert signed_log(np.zeros((0, 13), np.int64)).shape == (0, 13)
