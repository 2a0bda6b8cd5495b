mla_conformance::decode_conformance!(cpu_backend::Simple, mla_cpu::Cpu::new());
