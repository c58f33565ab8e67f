"""Drawing one token for each row of logits: records, the definition in torch, and the same in C++."""
