"""DeiT of transformers, trained from scratch on CIFAR-10 in equal time: plain, and with three techniques for ViTs.

    thrifty data get cifar10
    python benchmarks/deit_from_scratch.py                    # 32 runs of three minutes, one after the other
    python benchmarks/deit_from_scratch.py --seconds 20 --seeds 1 --name trial

AutoProg grows depth and image size, EfficientTrain starts with low frequencies, PatchDropout drops half of the patches
before 90 % of the run. All runs have the same time, learning rate and augmentation, and decay their learning rate to
zero. The curves of all runs are in the result.
"""

import argparse

import torch
from transformers import DeiTConfig, DeiTForImageClassification

import thrifty

TECHNIQUES = {
    "AutoProg": thrifty.AutoGrow(stages=4, search=0.02, multiple=4),
    "low frequencies": thrifty.LowFrequencyCurriculum(multiple=4),
    "PatchDropout": thrifty.DropPatches(rate=0.5, until=0.9),
}


def build() -> torch.nn.Module:
    sizes = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
    config = DeiTConfig(**sizes, image_size=32, patch_size=4)
    config.num_labels = 10
    return DeiTForImageClassification(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=180)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--name", default="deit")
    parser.add_argument("--save-result")
    options = parser.parse_args()
    recipe = thrifty.recipe(
        build,
        "cifar10",
        loss="classification",
        techniques=[thrifty.AdamW(lr=1e-3), "cosine:warmup=0.05", "mixed"],
        budget=f"{options.seconds}s",
        batch=64,
        settings={"data.augment.crop": 4, "data.augment.flip": True, "evaluation.examples": 2000},
        name=options.name,
    )
    verdict = thrifty.compare(
        recipe,
        TECHNIQUES,
        equal_budget="time",
        seeds=options.seeds,
        rate_trials=1,
        save_result=options.save_result,
    )
    print(verdict.table())


if __name__ == "__main__":
    main()
