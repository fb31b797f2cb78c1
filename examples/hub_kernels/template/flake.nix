{
  description = "Attention over token trees, and products of few rows";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs = { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
