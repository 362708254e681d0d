"""Tensors offloaded from a GPU to host memory during computation: every value returns, and no memory leaks."""

import gc

import torch
from gpu_only import GPU, on_a_gpu
from tiny_runs import advance, assert_same, losses, plain_run, snapshot, technique, with_optimizer

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.technique import Technique
from thrifty.memory.host_tier import tier_for

pytestmark = on_a_gpu


def run_of(plain: BaseRun, *chosen: Technique) -> Run:
    return compose(plain, with_optimizer(chosen), 6, GPU)


def test_sent_tensors_return_bit_identical_during_computation() -> None:
    """Freed memory is overwritten at once, so that a late copy would show."""
    tier = tier_for("auto", torch.ones(1, device=GPU))
    assert tier.name == "host"
    generator = torch.Generator(GPU).manual_seed(0)
    for _ in range(5):
        sent = []
        for place in range(40):
            tensor = torch.randn(200, 997, device=GPU, generator=generator).relu_()[:, : 997 - place]
            expected = (tensor.double().sum(), tensor.clone())
            ticket = tier.send(tensor)
            del tensor
            sent.append((ticket, *expected))
            if place >= 3:
                sent[place - 3][0].finish_transfer()
            torch.full((200, 997), torch.nan, device=GPU)  # overwrites the freed memory
        for place in reversed(range(40)):
            for ahead in sent[max(0, place - 3) : place]:
                ahead[0].prefetch()
            ticket, total, values = sent[place]
            back = ticket.get()
            assert torch.equal(back, values) and back.double().sum() == total
    del sent, ticket, back, values, ahead
    gc.collect()
    torch.cuda.synchronize()
    assert tier.account.now == 0


def test_offloaded_activations_are_exact_and_save_gpu_memory() -> None:
    plain = plain_run(batch=64, depth=8, style="gpt", dropout=0.3)
    results = []
    for chosen in ([], [technique("memory.offload_activations", prefetch=2, keep_last=0, min_elements=1)]):
        run = run_of(plain, *chosen)
        torch.cuda.synchronize()
        gc.collect()
        state = run.start()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        records = advance(run, state)
        results.append((losses(records), snapshot(state), torch.cuda.max_memory_allocated() - before))
        del state, run
    (expected, kept, most), (offloaded_losses, offloaded, less) = results
    assert offloaded_losses == expected
    assert_same(offloaded, kept)
    assert less < 0.6 * most


def test_offloaded_optimizer_equals_plain_run_without_gpu_state() -> None:
    """The state is in host memory and the CPU computes the update, so the result equals the plain run except the last
    bit."""
    plain = plain_run(style="gpt")
    reference = run_of(plain)
    state = reference.start()
    expected = losses(advance(reference, state))
    run = run_of(plain, technique("memory.offload_optimizer"))
    state = run.start()
    actual = losses(advance(run, state))
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-4, atol=0)
    assert state.optimizer is not None
    slots = [tensor for tensors in state.optimizer.slots.values() for tensor in tensors]
    assert slots and all(tensor.device.type == "cpu" for tensor in slots)


def test_gpu_run_equals_cpu_run_within_rounding() -> None:
    plain = plain_run(style="llama")
    runs = [compose(plain, with_optimizer([]), 6, device) for device in (torch.device("cpu"), GPU)]
    here, there = (torch.tensor(losses(advance(run, run.start()))) for run in runs)
    torch.testing.assert_close(there, here, rtol=1e-4, atol=0)
