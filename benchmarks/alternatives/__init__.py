"""Alternatives to sampling in 8 bits: rounded networks, ensembles and SWAG, scored alike.

    python -m benchmarks.alternatives mnist-mlp --data-dir DIR [--seeds 0 1 2] [--out FOLDER] [--option epochs=5 ...]

Rows (`rows`), each a store of samples (`stores`), all scored on the test set by the same code: error, NLL and ECE of the
average, AUROC against data of another kind (`outside`), bytes on disk of all samples, and gradient steps. Networks compute in
float32 when they are scored, also those that were trained in 8 bits. Nothing is tuned on test data: settings are the
experiment's own, but for the temperature, 0.001 unless ``--option temperature=`` says otherwise; those of methods it does not
have are in `rows`. Everything is resumed where it was interrupted; ``--runs`` names the folder of a sweep whose runs are not
done again.
"""
