"""Operations on tensors: one file, one op, one contract. They know no configuration, layer or rank."""
