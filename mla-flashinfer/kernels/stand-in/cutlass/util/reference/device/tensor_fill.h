// FlashInfer's cutlass_utils.cuh includes CUTLASS's header of this name for tests of its own; that
// header needs cuRAND. Nothing of it is used, so this empty one is found before it.
