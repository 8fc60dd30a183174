"""Frequencies of items: counted ones are exact, streamed ones approach them."""

from __future__ import annotations

import torch

from tilerec.retrieval.item_frequency import CountedFrequency, StreamingFrequency

CPU = torch.device("cpu")


def test_counted_frequencies_are_shares_of_the_total() -> None:
    # Row 2 has two values, as with hashed ids; rows 0 and 4 have none and count as one.
    frequency = CountedFrequency(torch.tensor([1, 2, 2, 3]), torch.tensor([5, 1, 1, 1]), 5, CPU)
    expected = (torch.tensor([1.0, 5.0, 2.0, 1.0, 1.0]) / 10).log()
    torch.testing.assert_close(frequency.log_q(torch.arange(5)), expected)
    assert frequency.log_q(torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_streamed_frequencies_approach_the_probability_of_being_in_a_batch() -> None:
    frequency = StreamingFrequency(4, 0.05, CPU)
    for step in range(2000):
        # Item 0 is in every batch, item 1 in every second, item 2 in every tenth; 3 never.
        batch = [0, 0] + [1] * (step % 2 == 0) + [2] * (step % 10 == 0)
        frequency.log_q(torch.tensor(batch))
    found = frequency.log_q(torch.tensor([0, 1, 2])).exp()
    torch.testing.assert_close(found, torch.tensor([1.0, 0.5, 0.1]), rtol=0.1, atol=0)


def test_probabilities_are_at_most_one() -> None:
    frequency = StreamingFrequency(1, 1.0, CPU)
    assert all(frequency.log_q(torch.tensor([0])).item() <= 0 for _ in range(3))
