//! The output of `ptxas -v` about each kernel.

use serde::{Deserialize, Serialize};

/// The resources that one kernel uses on one target.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// The mangled name, which the linker knows.
    pub symbol: String,
    /// The name in the source.
    pub name: String,
    /// The target as ptxas spells it, such as `sm_90a`.
    pub target: String,
    /// Registers per thread.
    pub registers: u32,
    /// Stack bytes per thread.
    pub stack: u32,
    /// Bytes per thread stored to local memory because registers are short.
    pub spill_stores: u32,
    /// Bytes per thread loaded from local memory for the same reason.
    pub spill_loads: u32,
    /// Static shared memory per block, in bytes. Dynamic shared memory is not included.
    pub shared: u32,
    /// Bytes of constant bank 0, which holds the parameters. Some releases do not print it.
    pub constant: u32,
    /// Named barriers per block.
    pub barriers: u32,
    /// The warnings of ptxas, for example that it serialised `wgmma` instructions.
    pub warnings: Vec<String>,
}

/// Reads the kernels from a compiler's output, in the order in which they were compiled.
pub(crate) fn parse(log: &str) -> Vec<Kernel> {
    let mut read = Reading::default();
    for line in log.lines() {
        read.line(line);
    }
    read.kernels
}

/// The kernels that have been read so far.
#[derive(Default)]
struct Reading {
    kernels: Vec<Kernel>,
    /// The function whose properties come next. Functions that were not inlined have properties,
    /// too. Only those of the kernel that is being compiled count.
    function: String,
    /// Warnings about kernels that were not read yet, with the kernels' symbols.
    waiting: Vec<(String, String)>,
}

impl Reading {
    fn line(&mut self, line: &str) {
        let Some((_, text)) = line.split_once(" : ").filter(|_| line.starts_with("ptxas")) else {
            let last = self.kernels.last_mut();
            if let Some(kernel) = last.filter(|kernel| kernel.symbol == self.function) {
                resources(line, kernel);
            }
            return;
        };
        let text = text.trim();
        if let Some(rest) = text.strip_prefix("Compiling entry function ") {
            self.begin(rest);
        } else if let Some(rest) = text.strip_prefix("Function properties for ") {
            self.function = rest.trim().to_owned();
        } else if let Some(rest) = text.strip_prefix("Used ") {
            // This is printed once per kernel, after the properties of all functions in it.
            if let Some(kernel) = self.kernels.last_mut() {
                resources(rest, kernel);
            }
        } else if !line.starts_with("ptxas info") || text.starts_with("(C") {
            self.warning(text);
        }
    }

    /// Begins a kernel. The text is like `'symbol' for 'sm_90a'`.
    fn begin(&mut self, text: &str) {
        let mut quoted = text.split('\'');
        let symbol = quoted.nth(1).unwrap_or_default().to_owned();
        let target = quoted.nth(1).unwrap_or_default().to_owned();
        self.function.clone_from(&symbol);
        let waiting = std::mem::take(&mut self.waiting);
        let (ours, others) = waiting.into_iter().partition(|(of, _)| *of == symbol);
        self.waiting = others;
        self.kernels.push(Kernel {
            name: demangled(&symbol),
            symbol,
            target,
            warnings: Vec::from_iter(ours)
                .into_iter()
                .map(|(_, it): (String, _)| it)
                .collect(),
            ..Kernel::default()
        });
    }

    /// Reads a warning. It may come before or after the kernel that it names.
    fn warning(&mut self, text: &str) {
        let named = text.split('\'').nth(1).unwrap_or_default();
        let mut latest_first = self.kernels.iter_mut().rev();
        match latest_first.find(|kernel| kernel.symbol == named) {
            Some(kernel) => kernel.warnings.push(text.to_owned()),
            None => self.waiting.push((named.to_owned(), text.to_owned())),
        }
    }
}

/// Reads a line of resources. It is like `0 bytes stack frame, 0 bytes spill stores, 0 bytes spill
/// loads` or `24 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]`. Older releases
/// leave out `used` before the barriers and print `1024+16 bytes smem`.
fn resources(text: &str, kernel: &mut Kernel) {
    for part in text.split(',') {
        let part = part.trim().trim_start_matches("used ");
        let Some((numbers, what)) = part.split_once(' ') else {
            continue;
        };
        let numbers = numbers.split('+').map(|number| number.parse::<u32>().ok());
        let Some(number) = numbers.sum::<Option<u32>>() else {
            continue;
        };
        let field = match what {
            "bytes stack frame" => &mut kernel.stack,
            "bytes spill stores" => &mut kernel.spill_stores,
            "bytes spill loads" => &mut kernel.spill_loads,
            "registers" => &mut kernel.registers,
            "barriers" => &mut kernel.barriers,
            "bytes smem" => &mut kernel.shared,
            "bytes cmem[0]" => &mut kernel.constant,
            "bytes cumulative stack size" => {
                kernel.stack = kernel.stack.max(number);
                continue;
            }
            _ => continue,
        };
        *field = number;
    }
}

pub(crate) fn demangled(symbol: &str) -> String {
    cpp_demangle::Symbol::new(symbol)
        .ok()
        .and_then(|symbol| symbol.demangle().ok())
        .unwrap_or_else(|| symbol.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nvcc_13_prints_is_read() {
        let log = "\
ptxas info    : 37 bytes gmem
ptxas info    : Compiling entry function '_Z1kPfi' for 'sm_90a'
ptxas info    : Function properties for _Z1kPfi
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Compile time = 3.707 ms
ptxas info    : Compiling entry function 'plain' for 'sm_100a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for _Z6helperv
    64 bytes stack frame, 64 bytes spill stores, 64 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 64 bytes cumulative stack size, 400 bytes cmem[0]
";
        let kernels = parse(log);
        assert_eq!(kernels.len(), 2);
        assert_eq!(
            kernels[0],
            Kernel {
                symbol: "_Z1kPfi".into(),
                name: "k(float*, int)".into(),
                target: "sm_90a".into(),
                registers: 24,
                stack: 16,
                spill_stores: 8,
                spill_loads: 12,
                shared: 1024,
                barriers: 1,
                ..Kernel::default()
            }
        );
        assert_eq!(
            (
                kernels[1].registers,
                kernels[1].barriers,
                kernels[1].constant,
                kernels[1].stack
            ),
            (168, 16, 400, 64)
        );
        assert_eq!(
            kernels[1].spill_stores, 0,
            "the spills of a called function are not the kernel's"
        );
    }

    #[test]
    fn a_warning_goes_to_the_kernel_that_it_names() {
        let log = "\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in function 'a'
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Used 24 registers
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Used 24 registers
ptxas warning : Value of threads per SM for entry b is out of range 'b'
";
        let kernels = parse(log);
        assert!(kernels[0].warnings[0].contains("C7510"));
        assert_eq!(kernels[0].warnings.len(), 1);
        assert_eq!(kernels[1].warnings.len(), 1);
    }
}
