mla_runtime::decode_conformance!(cpu_backend::Simple, mla_runtime::cpu::Cpu::new());
