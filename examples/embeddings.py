"""Embeddings of a folder of images, and the images that are nearest to one of them.

    python examples/embeddings.py photos --weights hf-hub:timm/vit_small_patch16_dinov3.lvd1689m [--query cat.jpg]

Writes vectors.npz: `vectors` (n, D) in fp32, each of length 1, and `paths` (n,). Images that cannot be read are named
and left out. For millions of images use `vitfast embed`, which writes shards and resumes.
"""

import argparse
from pathlib import Path

import numpy as np

import vitfast

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


def main(argv: list[str] | None = None) -> list[str]:
    """Embeds and writes the vectors; returns the paths of the nearest images, the nearest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", help="a folder, read at any depth")
    parser.add_argument("--weights", required=True, help="file, folder or hf-hub:owner/name")
    parser.add_argument("--output", default="vectors.npz", help="default vectors.npz")
    parser.add_argument("--query", help="an image file (default: the first image of the folder)")
    parser.add_argument("--nearest", type=int, default=5, help="how many images to print (default 5)")
    args = parser.parse_args(argv)

    paths = sorted(str(path) for path in Path(args.images).rglob("*") if path.suffix.lower() in ENDINGS)
    if not paths:
        parser.error(f"{args.images} has no images that end in {', '.join(ENDINGS)}")
    embedder = vitfast.Embedder(args.weights, normalize=True)
    wanted = embedder.embed([args.query])[0] if args.query else None
    vectors, skipped = embedder.embed(paths, errors="skip")
    for index, reason in reversed(skipped):
        print(f"left out: {reason}")
        del paths[index]
    if not paths:
        parser.error(f"no image of {args.images} can be read")
    with open(args.output, "wb") as file:  # np.savez would add .npz to a name that lacks it
        np.savez(file, vectors=vectors.numpy(), paths=np.array(paths))

    query = args.query or paths[0]
    similarity = vectors @ (vectors[0] if wanted is None else wanted)  # cosines
    order = similarity.argsort(descending=True)[: args.nearest].tolist()
    print(f"{len(paths)} vectors of {embedder.dim} numbers in {args.output}; nearest to {query}:")
    for i in order:
        print(f"{similarity[i]:.4f}  {paths[i]}")
    return [paths[i] for i in order]


if __name__ == "__main__":
    main()
