//! The GPU code of a build as separate files, if they are asked for.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::Plan;
use crate::{
    Error, bounded,
    code::{Code, CodeFile, FILE, Launches, Layouts, kernels},
    diagnostic,
    unit::{Language, Unit},
    variables,
    work_folder::WorkFolder,
};

impl Plan {
    /// Compiles each unit for each of its targets into a separate file and describes these files,
    /// if a folder for them is named.
    pub(super) fn write_code(&self, bindings: Option<&Path>) -> Result<(), Error> {
        let (kernels, root) = (&self.library.kernels, &self.library.root);
        let asked = || variables::set(variables::CODE).map(PathBuf::from);
        let Some(folder) = kernels.code.clone().or_else(asked) else {
            return Ok(());
        };
        super::empty(&folder)?;
        let launches = match &kernels.launches {
            Some(file) => Launches::load(root, file)?,
            None => Launches::default(),
        };
        let declarations = kernels.declarations.as_ref().map(|file| root.join(file));
        let mut layouts = Layouts::default();
        if let Some(path) = declarations.as_deref().or(bindings) {
            let text = bounded::read_to_string(path).map_err(Error::file("read", path))?;
            layouts.add_bindings(&text);
        }
        let work_folder = WorkFolder::open(&self.library.out_dir)?;
        let maps = self.write_path_maps(&work_folder)?;
        let mut files = Vec::new();
        for unit in self.units.iter().filter(|it| it.language == Language::Cuda) {
            for alone in unit.apart() {
                let work = work_folder.folder(&alone.file_stem())?;
                files.push(self.write_code_of(&alone, &folder, &work, &maps, &work_folder)?);
            }
        }
        let mut code = Code {
            package: self.library.package.clone(),
            library: self.library.name.clone(),
            files,
        };
        for file in &mut code.files {
            for kernel in &mut file.kernels {
                let known = Some(kernel.parameters.clone());
                launches.describe(kernel, [&file.source, &file.target], &layouts, known)?;
            }
        }
        if let Some(kernel) = launches.unused(&code) {
            let accepted = "the name of a kernel of its source";
            return Err(Error::setting("launches", kernel, accepted));
        }
        let path = folder.join(FILE);
        let text = serde_json::to_string_pretty(&code).map_err(Error::file("write", &path))?;
        fs::write(&path, text + "\n").map_err(Error::file("write", &path))
    }

    /// Compiles one unit for its one target.
    fn write_code_of(
        &self,
        unit: &Unit,
        folder: &Path,
        work: &Path,
        maps: &Path,
        work_folder: &WorkFolder,
    ) -> Result<CodeFile, Error> {
        let target = unit.targets().concat();
        let is_ptx = target.starts_with("compute_");
        let kind = if is_ptx { "ptx" } else { "cubin" };
        let name = format!("{}.{target}.{kind}", unit.file_stem());
        let path = folder.join(&name);
        let compiler = &self.tools.compiler;
        let mut command = compiler.code_command(unit, work, maps, (kind, &path))?;
        let ran = work_folder.run(&mut command);
        let finished = ran.map_err(Error::file("run", compiler.program(unit)))?;
        let tool = |message: String| Error::tool(format!("nvcc -{kind} {unit}"), message);
        if !finished.status.success() {
            let status = finished.status.to_string();
            return Err(tool(diagnostic::first_error(&finished.log, &status)));
        }
        let bytes = bounded::read(&path).map_err(Error::file("read", &path))?;
        let kernels = match is_ptx {
            true => Vec::new(),
            false => kernels(&bytes).ok_or_else(|| {
                tool("a cubin of an unknown form, whose kernels cannot be read".into())
            })?,
        };
        Ok(CodeFile {
            file: name,
            blake3: blake3::hash(&bytes).to_hex().to_string(),
            source: unit.source.clone(),
            target,
            kernels,
        })
    }
}
