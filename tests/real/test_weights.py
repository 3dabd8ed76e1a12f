"""Buckets: every byte has one place, whatever the sizes; and the model is a function of its spec."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlsched.real.model import ModelSpec, build, fill
from rlsched.real.transport import Tensor, plan
from rlsched.real.weights import WeightSet

pytestmark = pytest.mark.real

tensors = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([1, 2, 4, 8])), max_size=8).map(
    lambda sizes: [Tensor(f"t{i}", count, itemsize) for i, (count, itemsize) in enumerate(sizes)]
)


@given(tensors, st.integers(8, 1000))
def test_a_plan_places_every_element_once_aligned_and_in_bounds(tensors, bucket_bytes):
    itemsize = {tensor.name: tensor.itemsize for tensor in tensors}
    placed = {tensor.name: 0 for tensor in tensors}
    for bucket in plan(tensors, bucket_bytes):
        end = 0
        assert bucket
        for piece in bucket:
            assert piece.start == placed[piece.name]
            assert piece.count > 0
            assert piece.offset >= end
            assert piece.offset % itemsize[piece.name] == 0
            placed[piece.name] += piece.count
            end = piece.offset + piece.count * itemsize[piece.name]
            assert end <= bucket_bytes
    assert placed == {tensor.name: tensor.count for tensor in tensors}


@given(tensors, st.integers(8, 1000))
def test_a_plan_wastes_less_than_two_elements_a_bucket(tensors, bucket_bytes):
    buckets = plan(tensors, bucket_bytes)
    itemsize = {tensor.name: tensor.itemsize for tensor in tensors}
    for bucket in buckets[:-1]:
        # What is left can't hold the next element of at most 8 bytes, up to 7 of which go to its alignment.
        assert bucket[-1].offset + bucket[-1].count * itemsize[bucket[-1].name] > bucket_bytes - 15


def test_a_bucket_must_hold_an_element():
    with pytest.raises(ValueError, match="can't hold"):
        plan([Tensor("t", 1, 8)], 7)


@pytest.mark.parametrize("bucket_bytes", [8, 100, 1 << 20])
def test_pack_and_copy_are_bit_exact_for_mixed_types(bucket_bytes):
    def model(fill_seed):
        torch.manual_seed(fill_seed)
        module = nn.Module()
        module.b = nn.Parameter(torch.randn(7, 3).to(torch.bfloat16))
        module.a = nn.Parameter(torch.randn(5, 11))
        module.c = nn.Parameter(torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float64))
        return WeightSet(module)

    source, target = model(1), model(2)
    assert source.checksum() != target.checksum()
    buffer = torch.zeros(bucket_bytes, dtype=torch.uint8)
    copied = 0
    for pieces in source.buckets(bucket_bytes):
        assert source.pack(buffer, pieces) <= bucket_bytes
        copied += target.copy(buffer, pieces)
    assert source.checksum() == target.checksum()
    assert copied == source.nbytes == 7 * 3 * 2 + 5 * 11 * 4 + 3 * 8


def test_a_checksum_leaves_storages_resizable():
    weights = WeightSet(build(ModelSpec()))
    weights.checksum()
    for parameter in weights.parameters.values():
        parameter.untyped_storage().resize_(0)


def test_version_0_is_a_function_of_the_spec():
    torch.manual_seed(1)
    one = WeightSet(build(ModelSpec()))
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    two = WeightSet(build(ModelSpec()))
    other = build(ModelSpec(seed=1))
    assert one.checksum() == two.checksum() != WeightSet(other).checksum()
    fill(other, ModelSpec())
    assert WeightSet(other).checksum() == one.checksum()
    torch.manual_seed(1)
    build(ModelSpec())
    assert torch.equal(torch.random.get_rng_state(), state)  # and leaves the caller's generator alone


def test_the_spec_counts_its_parameters():
    for spec in (ModelSpec(), ModelSpec(vocab=512, layers=3, heads=2, kv_heads=1, head_dim=32)):
        assert sum(p.numel() for p in build(spec).parameters()) == spec.parameters()


def test_matrices_have_the_spread_asked_for():
    model = build(ModelSpec(hidden=256, init_std=0.08))
    assert float(model.model.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(0.08, rel=0.02)
    assert torch.all(model.model.norm.weight == 1)
