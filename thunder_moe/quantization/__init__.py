"""`quantize_` and its way back: which modules of a model become 4-bit (choose, plan), by families of experts and of
dense layers. Called by users, finetune, integrations and tools; calls nn and kernels. Nothing is imported here."""
