"""Several processes that run one model together: who they are, what each holds, how they talk, how they start and end."""
