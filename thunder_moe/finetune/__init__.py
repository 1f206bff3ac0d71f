"""Fine-tuning of 4-bit models: LoRA adapters (lora), merged into weights (merge), quantization-aware training (qat).
Called by users, integrations and parallel; calls quantization and nn. Nothing is imported here."""
