"""The drafter, in SGLang's layers."""
