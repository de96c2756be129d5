"""Draft vocabulary: choice, ties, fill, maps."""

from __future__ import annotations

import logging

import pytest
import torch

from heads.errors import HeadwayError
from heads.vocabulary import choose_vocabulary


def test_most_frequent_special_kept_ties_by_id():
    #                      0  1  2  3  4  5  6  7
    counts_V = torch.tensor([0, 5, 0, 7, 5, 5, 0, 1])
    vocabulary = choose_vocabulary(counts_V, 4, special_ids=[6])
    # 6 is special; 3 is the most frequent; 1, 4 and 5 tie and the smaller ids win.
    assert vocabulary.ids_D.tolist() == [1, 3, 4, 6]
    assert vocabulary.d2t.tolist() == [1, 2, 2, 3]
    assert vocabulary.t2d.nonzero().squeeze(1).tolist() == [1, 3, 4, 6]
    assert vocabulary.coverage(counts_V) == pytest.approx(17 / 23)
    assert not vocabulary.full


def test_fills_deterministically_and_says_so(caplog: pytest.LogCaptureFixture):
    counts_V = torch.tensor([0, 0, 3, 0, 0, 1])
    with caplog.at_level(logging.WARNING):
        vocabulary = choose_vocabulary(counts_V, 4, special_ids=[])
    assert vocabulary.ids_D.tolist() == [0, 1, 2, 5]
    assert "only 2 of its 4 tokens were seen" in caplog.text


def test_full_vocabulary_needs_no_maps():
    for size in (None, 6):
        vocabulary = choose_vocabulary(torch.arange(6), size, special_ids=[0, 99])
        assert vocabulary.full
        assert vocabulary.d2t.tolist() == [0] * 6


@pytest.mark.parametrize("size", [0, -3, 7])
def test_refuses_impossible_sizes(size: int):
    with pytest.raises(HeadwayError, match=f"draft_vocab_size: {size} .*between 1 and .* 6"):
        choose_vocabulary(torch.arange(6), size, special_ids=[])


def test_refuses_fewer_places_than_special_tokens():
    with pytest.raises(HeadwayError, match="cannot hold the target's 3 special tokens"):
        choose_vocabulary(torch.arange(6), 2, special_ids=[0, 1, 5])
