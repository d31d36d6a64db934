"""Embeddings of images on many machines: vitfast.Embedder in the actors of Ray Data.

    pip install "ray[data]"
    python examples/embed_ray.py s3://bucket/photos --weights runs/b16/checkpoints/last --output s3://bucket/vectors

Reads every file below a folder and writes Parquet: path, vector (D float32), error. An image that cannot be read has
no vector; its row says why. Every actor loads the weights, so give a path that all machines see, or hf-hub:owner/name.
If you start the job again, it computes everything again; `vitfast embed` resumes, on one machine or under torchrun.
"""

import argparse

import pyarrow as pa
import ray

import vitfast


class EmbedBatch:
    """An actor: it loads the model once and embeds batch after batch."""

    def __init__(self, weights: str, **options):
        self.embedder = vitfast.Embedder(weights, **options)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """path, bytes -> path, vector, error."""
        paths, contents = batch["path"].to_pylist(), batch["bytes"].to_pylist()
        found = [one for _, one in self.embedder.stream_groups(zip([None] * len(paths), contents, paths))]
        vectors = pa.array([one.vector for one in found], pa.list_(pa.float32()))
        return pa.table(dict(path=paths, vector=vectors, error=pa.array([one.error for one in found], pa.string())))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("images", help="a folder or file, local or as pyarrow's file systems have it (s3://, gs://)")
    add("--weights", required=True, help="file, folder or hf-hub:owner/name")
    add("--output", required=True, help="folder of Parquet files")
    add("--actors", type=int, default=1, help="number of actors, such as one for each GPU (default 1)")
    add("--gpus", type=float, default=1, help="GPUs of each actor; 0 computes on CPUs (default 1)")
    add("--cpus", type=int, default=8, help="CPUs of each actor, and threads that read images (default 8)")
    add("--batch-size", type=int, default=512, help="images that an actor gets at once (default 512)")
    add("--normalize", action="store_true", help="divide each vector by its L2 norm")
    args = parser.parse_args(argv)
    options = dict(normalize=args.normalize, workers=args.cpus, device="cuda" if args.gpus else "cpu")
    ray.data.read_binary_files(args.images, include_paths=True).map_batches(
        EmbedBatch,
        fn_constructor_args=(args.weights,),
        fn_constructor_kwargs=options,
        batch_size=args.batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=args.actors),
        num_cpus=args.cpus,
        num_gpus=args.gpus,
    ).write_parquet(args.output)


if __name__ == "__main__":
    main()
