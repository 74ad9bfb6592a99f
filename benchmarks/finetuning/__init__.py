"""Fine-tuning with adapters beside torch and PEFT: models and the processes that train them."""
